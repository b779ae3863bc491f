r"""Suites of ``engine eval --suite``: public sets, each measured by a published protocol.

A suite is an ``[[eval.set]]`` in which every key that changes a score is set. ``follows`` names the protocol, and
``differs`` says in words where the suite is not the same, because a score is comparable only as far as its protocol is.
Left out: sets whose answers a model or a person must judge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_core.config.evaluation import EvalConfig, EvalSetConfig
from engine_core.errors import ConfigError, did_you_mean

MAX_PROMPT_TOKENS = 4096
"""Longer than each prompt of a suite; a prompt that is too long is an error, because a skipped one would change the score."""
LM_EVAL = "https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/tasks/gsm8k/gsm8k.yaml"
QWEN = "https://github.com/QwenLM/Qwen2.5-Math/tree/main/evaluation"
DEEPSEEK = "https://github.com/deepseek-ai/DeepSeek-R1#4-evaluation-results"
VERL = "https://github.com/volcengine/verl/blob/main/examples/data_preprocess/gsm8k.py"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
REWARD_OPTIONS: Mapping[str, Mapping[str, Any]] = {"numeric": {"boxed": "ignore"}}
"""Options of the rewards of suites, which are not those of the run file."""
GRADER = "math-verify compares the answers, and reads several \\boxed{} with little between them as one set"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A public set and the protocol by which it is measured."""

    source: str  #: data source; its split ``validation`` is measured
    shots: int = 0  #: worked examples before each question
    suffix: str  #: text after each question
    chat: bool = True  #: prompts in the tokenizer's chat template, else plain text
    rewards: Mapping[str, str]  #: rewards with what each reads, in words; the first one decides accuracy
    #: keys of ``[[eval.set]]`` by which responses are sampled; greedy without a temperature
    sampling: Mapping[str, Any]
    follows: str  #: the published protocol
    url: str  #: where it is published
    differs: tuple[str, ...] = field(default=())  #: what is not the same, one clause each

    def eval_set(self, name: str, folder: Path | None = None) -> dict[str, Any]:
        """Return the suite as an ``[[eval.set]]`` table.

        Args:
            name: its name.
            folder: a folder with the files of the set; None: the hub.
        """
        options: dict[str, Any] = {"shots": self.shots, "suffix": self.suffix}
        return {
            "name": name,
            "source": self.source,
            self.source: options | ({"folder": str(folder)} if folder else {}),
            "chat_template": self.chat,
            "rewards": list(self.rewards),
            "stop": [],
            **self.sampling,
        }


def described(table: EvalSetConfig) -> str:
    """Return the prompts and the sampling of a set in words: ``zero-shot, chat template, greedy, at most 1024 tokens``."""
    shots = table.options.shots
    parts = [
        f"{shots}-shot" if shots else "zero-shot",
        "chat template" if table.chat_template else "plain text",
    ]
    if table.temperature == 0:
        parts.append("greedy")
    else:
        parts.append(f"{table.samples_per_prompt} responses at temperature {table.temperature:g}")
        parts += [f"{name} {getattr(table, name):g}" for name in table.cutting]
    parts.append(f"at most {table.max_response_tokens} tokens")
    if table.stop:
        parts.append(f"until {' or '.join(map(repr, table.stop))}")
    return ", ".join(parts)


_STRICT = {"gsm8k": "the number after the last ####", "numeric": "the last number of the response"}
_MATH = {"math": r"the last \boxed{}, formula or number"}
_MATH_GREEDY: dict[str, Any] = {
    "suffix": BOXED,
    "rewards": _MATH,
    "sampling": {"max_response_tokens": 2048},
    "follows": "Qwen2.5-Math, prompt type qwen-boxed",
    "url": QWEN,
    "differs": (GRADER, "the system message is the one of the model's chat template"),
}
_AIME: dict[str, Any] = {
    "suffix": BOXED,
    "rewards": _MATH,
    "sampling": {
        "temperature": 0.6,
        "top_p": 0.95,
        "samples_per_prompt": 32,
        "max_response_tokens": 32768,
    },
    "follows": "DeepSeek-R1, pass@1 as the mean over samples (avg@32)",
    "url": DEEPSEEK,
    "differs": ("32 responses to each prompt, not 64", GRADER),
}

SUITES: Mapping[str, Suite] = {
    "gsm8k": Suite(
        source="gsm8k",
        suffix='Let\'s think step by step and output the final answer after "####".',
        rewards=_STRICT,
        sampling={"max_response_tokens": 1024},
        follows="verl, its GSM8K examples with strict extraction",
        url=VERL,
        differs=(
            "a period after the number is ignored",
            "the whole response is read, not its last 300 characters",
        ),
    ),
    "gsm8k_5shot": Suite(
        source="gsm8k",
        shots=5,
        suffix="",
        chat=False,
        rewards=_STRICT,
        sampling={"max_response_tokens": 256, "stop": ["Question:", "</s>", "<|im_end|>"]},
        follows="lm-evaluation-harness, gsm8k 3.0: strict-match (gsm8k) and flexible-extract (numeric)",
        url=LM_EVAL,
        differs=(
            "the worked examples are the first 5 training rows for each question, not 5 random ones",
            "gsm8k reads the last #### of a response, where strict-match reads the first",
            "numeric compares values, so 72.0 and 144/2 are 72, where flexible-extract compares text",
        ),
    ),
    "math500": Suite(source="math500", **_MATH_GREEDY),
    "math": Suite(source="math", **_MATH_GREEDY),
    "aime24": Suite(source="aime24", **_AIME),
    "aime25": Suite(source="aime25", **_AIME),
}


def chosen_suites(names: Collection[str]) -> dict[str, Suite]:
    """Return the suites of ``--suite``; a name may be a list with commas.

    Raises:
        ConfigError: a name is unknown, or there is none.
    """
    listed = [part.strip() for name in names for part in name.split(",") if part.strip()]
    unknown = [name for name in listed if name not in SUITES]
    if unknown or not listed:
        what = f"unknown suite '{unknown[0]}'" if unknown else "expected a name"
        raise ConfigError(f"--suite: {what}.{did_you_mean(unknown[0] if unknown else '', SUITES)}")
    return {name: SUITES[name] for name in listed}


def folder_of(suite: Suite, folder: Path | None, several: bool) -> Path | None:
    """Return the folder with the files of a suite's set.

    Args:
        suite: the suite.
        folder: ``--source``: the files of a set, or a folder for each data source, by its name.
        several: whether suites of several data sources are measured.

    Raises:
        ConfigError: there is no such folder.
    """
    if folder is None:
        return None
    inner = folder / suite.source
    found = inner if several or inner.is_dir() else folder
    if not found.is_dir():
        raise ConfigError(
            f"--source: there is no folder '{found}'. Expected a copy of the set's hub repository, for several sets one "
            "folder for each data source, by its name."
        )
    return found.resolve()


def run_settings(suites: Mapping[str, Suite], folder: Path | None) -> dict[str, Any]:
    """Return the settings that measure suites, over those of any run, as ``load_config`` takes them.

    They replace what a run file says about rows, rewards and evaluation. Its model and its sampler stay, and the
    arguments of the chat template.
    """
    several = len({suite.source for suite in suites.values()}) > 1
    rewards = dict.fromkeys(reward for suite in suites.values() for reward in suite.rewards)
    none: dict[str, Any] = {
        "train": [],
        "validation": [],
        "source": "",
        "mix": [],
        "curriculum": "",
        "system": None,
    }
    return {
        "trainer": "evaluate",
        "reward": [{"name": name, name: REWARD_OPTIONS.get(name, {})} for name in rewards],
        "data": none | {"over_long": "error", "max_prompt_tokens": MAX_PROMPT_TOKENS},
        "eval": EvalConfig().model_dump(mode="json"),
        "eval.set": [
            suite.eval_set(name, folder_of(suite, folder, several)) for name, suite in suites.items()
        ],
    }
