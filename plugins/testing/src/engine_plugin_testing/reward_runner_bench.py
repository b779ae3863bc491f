"""The bench of the reward runner: samples of every kind, rewards of every form, and what must come of them."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.rewards import RewardConfig
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_core.types import Prompt, Rollout
from engine_plugin_testing import reward_probe
from engine_plugin_testing.bench import Bench
from engine_plugin_testing.reward_probe import MARKS, shown

if TYPE_CHECKING:
    from engine_core.rewards.signatures import Outcome

TIMEOUT = 1.5  # seconds of a sample
TEXTS = ("", "4", "so 4.0", "\u00e9\u4f60\U0001f600\n\t\u0000", '{"done": true}', "a" * 3000)
NUMBERS = ("number", "integer", "truth", "fraction", "scalar", "score", "answer", "long answer", "no answer")
NOTHING = ("nothing", "no score")
BAD = ("nan", "infinite", "huge", "text", "list", "empty")  # results that are no reward
RAISING = ("raise", "memory", "allocate")
KILLING = ("exit", "crash", "stuck")
LATE = ("stuck", "late", "given timeout")
LENGTH = 1000  # characters of an answer
ARGUMENTS = {
    "each": "completion prompt response_length finish_reason dialogue last_turn prompt_ids completion_ids token_ids row do label",
    "each_later": "completion row do label",
    "lists": "completion prompt response_length finish_reason dialogue last_turn row do label",
    "lists_later": "completion prompt_ids do",
    "groups": "completion group_id do",
    "verl": "data_source completion ground_truth do extra_info",
    "trl": "prompt completion completion_ids do row data_source answer label ground_truth extra_info",
    "object": "completion do row",
}  # of each form, in singular
SINGULAR = ("each", "each_later", "verl", "object")  # forms that get one sample a call
STREAMS = ("each", "verl", "object")  # those that score one sample after another
NAMES = {"verl": {"completion": "solution_str"}}
PLURAL = ("completion", "prompt", "response_length", "finish_reason", "dialogue", "last_turn", "group_id")
DEFAULTS = {"label": "no label", "extra_info": None}
ANSWERS = {"answer": "4", "long answer": "\u00e9" * LENGTH}


@dataclass
class Step:
    """The samples of a step.

    Attributes:
        kinds: what happens to each sample, see ``reward_probe.happens``.
        groups: number of the group of each sample.
        columns: columns that the rows have besides ``row``, ``do``, ``data_source`` and ``answer``.
        file: file with a line for each call.
    """

    kinds: list[str]
    groups: list[int]
    columns: tuple[str, ...]
    file: Path
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def calls(self) -> Counter[str]:
        """The number of calls of each sample."""
        return Counter(self.file.read_text("utf-8").split()) if self.file.exists() else Counter()


@dataclass(frozen=True)
class Settings:
    """The settings of the rewards of one runner.

    Attributes:
        weights: by form.
        workers: of each reward.
        clip: range of the values.
        on_error: policy for an error, "drop" or "zero".
        on_timeout: policy for a timeout.
    """

    weights: Mapping[str, float]
    workers: int
    clip: tuple[float, float] | None = None
    on_error: str = "drop"
    on_timeout: str = "drop"


class RewardRunnerBench(Bench):
    """A bench that runs rewards of every form."""

    kind = "rewards"
    count = 0

    def runner(self, settings: Settings, **more: Any) -> RewardRunner:
        """Build a runner of these rewards; it is closed after the contract.

        Args:
            settings: rewards and policies.
            more: further keys of ``[[reward]]``.
        """
        names = {form: f"kit_{form}" for form in settings.weights}
        modules = [*self.settings["plugins"], reward_probe.__file__]
        tables = {"tables": self.settings["plugin_options"]}
        plugins = PluginSet.load(
            {"rewards": set(names.values())}, modules, Path(self.settings["root"]), True, **tables
        )
        shared: dict[str, Any] = {
            "workers": settings.workers,
            "clip": settings.clip,
            "timeout_seconds": TIMEOUT,
        }
        shared |= {"on_error": settings.on_error, "on_timeout": settings.on_timeout, "max_failure_share": 1.0}
        configs = [
            RewardConfig(
                name=name,
                weight=settings.weights[form],
                options=plugins.spec("rewards", name).config(),
                **{**shared, **more},
            )
            for form, name in names.items()
        ]
        made = RewardRunner(configs, plugins)
        self.stack.callback(made.close)
        return made

    def step(
        self, kinds: Sequence[str], draws: random.Random, columns: Sequence[str] = ("label",), size: int = 0
    ) -> Step:
        """Make rollouts of these kinds, in groups.

        Args:
            kinds: one for each sample.
            draws: draws texts, tokens, rows and groups.
            columns: as ``Step.columns``.
            size: of each group; 0: random.
        """
        self.count += 1
        groups: list[int] = []
        while len(groups) < len(kinds):
            groups += [3 * len(groups) + 1] * (size or draws.randint(1, 4))
        made = Step(list(kinds), groups[: len(kinds)], tuple(columns), self.folder / f"calls-{self.count}")
        made.rollouts = [self._rollout(made, at, draws) for at in range(len(kinds))]
        return made

    def _rollout(self, step: Step, at: int, draws: random.Random) -> Rollout:
        """Make one rollout; it has every argument that the engine offers."""
        id, text = f"r{self.count}-{at}", draws.choice(TEXTS) + str(at)
        row: Any = draws.choice((None, [], at, 0.1 * at, {"deep": [None, {"\u00e9": [1.5, True, "x"]}]}))
        columns = {"row": row, "data_source": draws.choice(("sums", "")), "answer": f"answer {at}"}
        columns["do"] = {
            "id": id, "kind": step.kinds[at], "file": str(step.file), "children": f"{step.file}-children"
        }  # fmt: skip
        columns |= {name: draws.choice((None, f"{name} {at}")) for name in step.columns}
        prompt = [draws.randrange(99) for _ in range(draws.randint(1, 5))]
        ids = [*prompt, *(draws.randrange(99) for _ in range(draws.randint(0, 6)))]
        where = torch.arange(len(ids))
        messages: Any = draws.choice(
            (
                [],
                [{"role": "assistant", "content": "a", "seconds": 1.5}, {"role": "tool", "content": "b"}],
                [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"z{at}", "calls": [1]}],
            )
        )
        return Rollout(
            request_id=id,
            prompt=Prompt(f"train:{at}", prompt, f"prompt {at}", columns),
            token_ids=torch.tensor(ids),
            loss_mask=where >= len(prompt),
            rollout_log_probs=torch.zeros(len(ids)),
            policy_versions=torch.zeros(len(ids), dtype=torch.int32),
            finish_reason=draws.choice(("stop", "length", "abort")),
            group_id=step.groups[at],
            text=text,
            messages=messages,
        )

    # -- what must come -----------------------------------------------------

    def expected(self, form: str, workers: int, step: Step) -> list[tuple[float | None, str, str | None]]:
        """Return the value, the kind of failure and the answer of each sample."""
        kinds = step.kinds
        if form not in SINGULAR and (form == "groups" or not workers):  # one call
            ending = [kind for kind in kinds if kind in (*RAISING, *KILLING)]
            if ending:
                return [(None, "timeout" if ending[0] in LATE else "error", None)] * len(kinds)
        return [self._expected(form, step, at) for at in range(len(kinds))]

    def _expected(self, form: str, step: Step, at: int) -> tuple[float | None, str, str | None]:
        kind = step.kinds[at]
        failing = {*BAD, *RAISING, *KILLING}
        failing |= set() if form in SINGULAR else {"given error", "given timeout"}
        failing |= {"late"} if form == "each_later" else set()
        if kind in failing:
            return None, "timeout" if kind in LATE else "error", None
        if kind in NOTHING:
            return None, "", None
        value = shown(self._shown(form, step, at))
        answer = f" Is\n{value} " if kind == "score" else ANSWERS.get(kind)
        if kind in ("integer", "truth", "fraction"):
            value = float(reward_probe.RESULTS[kind](value))
        return value, "", answer

    def _shown(self, form: str, step: Step, at: int) -> Any:
        """Return what a function of this form shows of the arguments of a sample."""
        rollout, given = step.rollouts[at], {}
        for argument in ARGUMENTS[form].split():
            if form == "trl" and argument not in (*PLURAL, "completion_ids", *rollout.prompt.columns):
                continue
            name = argument if form in SINGULAR or argument not in PLURAL else f"{argument}s"
            given[NAMES.get(form, {}).get(argument, name)] = argument_of(argument, rollout)
        given["marks"] = list(MARKS)
        if form in SINGULAR:
            return given
        return [given, step.groups] if form == "groups" else [given]

    def check(
        self, runner: RewardRunner, settings: Settings, step: Step, metrics: Mapping[str, float], what: str
    ) -> None:
        """Compare rewards, answers, validity and metrics of a scored step with what must come."""
        count = len(step.kinds)
        totals, valid, applied = [0.0] * count, [True] * count, [False] * count
        low, high = settings.clip or (-math.inf, math.inf)
        wanted: dict[str, float] = {"reward/failures": 0, "reward/timeouts": 0}
        for scorer, (form, weight) in zip(runner.scorers, settings.weights.items(), strict=True):
            name, found = f"kit_{form}", scorer.runner.outcomes
            rows = self.expected(form, settings.workers, step)
            for at, ((value, failure, answer), outcome) in enumerate(zip(rows, found, strict=True)):
                shown = f"{what}: sample {at} ('{step.kinds[at]}') by {form}"
                self._check_outcome(shown, step.rollouts[at], name, (value, failure, answer), outcome)
                policy = {"error": settings.on_error, "timeout": settings.on_timeout}.get(failure, "")
                value = 0.0 if policy == "zero" else value
                assert step.rollouts[at].rewards[name] == value, (
                    f"{shown} got the reward {step.rollouts[at].rewards[name]}; expected {value}."
                )
                valid[at] = valid[at] and policy != "drop"
                if value is not None:
                    applied[at] = True
                    totals[at] += weight * min(max(value, low), high)
            kinds = Counter(failure for _, failure, _ in rows if failure)
            for kind in ("error", "timeout"):
                wanted[f"reward/{name}/{kind}s"] = kinds[kind]
            wanted["reward/failures"] += kinds.total()
            wanted["reward/timeouts"] += kinds["timeout"]
            if form in STREAMS:
                lost = (*KILLING, "memory", "allocate") if settings.workers else ()
                wanted[f"reward/{name}/restarts"] = sum(kind in lost for kind in step.kinds)
        for at, rollout in enumerate(step.rollouts):
            shown = f"{what}: sample {at} ('{step.kinds[at]}')"
            expected = (totals[at], valid[at] and applied[at])
            assert math.isclose(rollout.reward, totals[at], rel_tol=1e-9, abs_tol=1e-12), (
                f"{shown} has the reward {rollout.reward}; expected {totals[at]}."
            )
            assert rollout.valid == expected[1], f"{shown}: valid is {rollout.valid}; expected {expected[1]}."
        rewards = [rollout.reward for rollout in step.rollouts if rollout.valid]
        wanted["reward/mean"] = statistics.fmean(rewards) if rewards else 0.0
        for key, value in wanted.items():
            assert math.isclose(metrics[key], value, abs_tol=1e-9), (
                f"{what}: {key} is {metrics[key]}; expected {value}."
            )

    def _check_outcome(
        self, what: str, rollout: Rollout, name: str, expected: tuple[Any, str, Any], outcome: Outcome | None
    ) -> None:
        assert outcome is not None, f"{what} got no outcome."
        found = (outcome.value, outcome.failure, rollout.answers.get(name))
        assert found == expected, f"{what} got {found} ({outcome.message}); expected {expected}."
        kind = rollout.prompt.columns["do"]["kind"]
        if kind == "raise" and outcome.failure and name.removeprefix("kit_") in SINGULAR:
            assert rollout.request_id in outcome.message, f"{what}: the message is '{outcome.message}'."
            assert "in happens" in outcome.trace, f"{what}: the traceback is '{outcome.trace}'."
        assert bool(outcome.message) == bool(outcome.failure), f"{what}: the message is '{outcome.message}'."


def argument_of(argument: str, rollout: Rollout) -> Any:
    """Return an argument of one sample, as its function must get it."""
    prompt, response = rollout.prompt, rollout.token_ids.tolist()[len(rollout.prompt.token_ids) :]
    kept = [{key: m[key] for key in ("role", "content")} for m in rollout.messages]
    last = kept[-1] if kept else {"role": "assistant", "content": rollout.text}
    offered = {
        "completion": rollout.text,
        "prompt": prompt.text,
        "response_length": len(response),
        "finish_reason": rollout.finish_reason,
        "dialogue": kept or [last],
        "last_turn": last["content"] if last["role"] == "assistant" else "",
        "prompt_ids": list(prompt.token_ids),
        "completion_ids": response,
        "token_ids": rollout.token_ids.tolist(),
        "group_id": rollout.group_id,
    }
    if argument in offered:
        return offered[argument]
    if argument == "ground_truth" and argument not in prompt.columns:
        return prompt.columns["answer"]
    return prompt.columns.get(argument, DEFAULTS.get(argument))
