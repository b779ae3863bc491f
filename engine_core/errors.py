"""Errors that a user can act on.

::

    EngineError                     exit code
    |-- ConfigError                 2   a TOML, an override or a command line is wrong
    |-- PluginError                 3   a plugin or a name that plugins offer is absent, or a plugin is broken
    |-- DataError                   4   a row, a file or a checkpoint cannot be used
    |-- EnvironmentProblem          5   the machine: memory, shared memory, disk, open files
    |-- TrainingFailed              6   training failed and more steps cannot fix it
    |-- SamplerLost                 6   a sampler's process died or hung too often; the trainer is intact
    `-- WorkerLost                  6   a worker process died or stopped responding

Each prints as its message, without a traceback. Any other exception that reaches the command line
is a bug of the engine and shows its traceback. A message names the key, its value, what was
expected, what to do, and the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

NO_HUB = (
    " Where the hub cannot be reached, give a local folder in [model] path, as save_pretrained writes it; with "
    "HF_HUB_OFFLINE=1 a model that is cached is used without asking."
)
"""The last sentence of a message about a hub name that did not load."""


class EngineError(Exception):
    """The base class of errors whose message says what to do; printed without a traceback."""

    exit_code = 1


class ConfigError(EngineError):
    """One or more problems of a configuration, all found in one pass.

    Args:
        problems: one line per problem; each is understandable alone.
        config: the config, if each of its values has the right type; else None.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str], config: Any = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)  #: a line each
        self.config = config  #: the config, if each of its values has the right type; else None
        super().__init__("\n".join(self.problems))


class PluginError(EngineError):
    """A plugin or a name (a reward, a loss) cannot be found, or a plugin cannot be imported or breaks its declaration."""

    exit_code = 3


class DataError(EngineError):
    """A data file, a row, a tokenizer or a checkpoint cannot be used."""

    exit_code = 4


class EnvironmentProblem(EngineError):
    """The machine lacks something the run needs."""

    exit_code = 5


class TrainingFailed(EngineError):
    """Training cannot continue; the last good checkpoint is untouched."""

    exit_code = 6


class SamplerLost(TrainingFailed):
    """A sampler's process died or hung too often. The trainer is intact: the last finished step can be saved."""


class WorkerLost(TrainingFailed):
    """A worker died or missed its deadline.

    Args:
        role: the worker's role, such as ``actor``.
        rank: the worker's rank within the role.
        host: the host of the worker.
        cause: the reason, as far as it is known.
    """

    def __init__(self, role: str, rank: int, host: str, cause: str) -> None:
        self.role, self.rank, self.host, self.cause = role, rank, host, cause  #: constructor argument
        super().__init__(f"Lost worker {role}[{rank}] on {host}: {cause}")


ELSEWHERE = {
    "lr": "learning_rate peak_lr",
    "warmup_steps": "warmup_ratio num_warmup_steps",
    "max_grad_norm": "gradient_clip gradient_clipping clip_grad grad_clip",
    "group_size": "num_generations n n_samples_per_prompt rollout_n",
    "max_response_tokens": "max_completion_length max_new_tokens max_response_length max_tokens",
    "max_prompt_tokens": "max_prompt_length",
    "temperature": "do_sample",
    "prompts_per_step": "train_batch_size batch_size per_device_train_batch_size gen_batch_size",
    "max_tokens_per_rank": "gradient_accumulation_steps ppo_max_token_len_per_gpu micro_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "steps": "max_steps total_training_steps",
    "epochs": "num_train_epochs total_epochs num_epochs",
    "every_steps": "save_steps eval_steps test_freq save_freq save_interval",
    "keep_last": "save_total_limit max_actor_ckpt_to_keep",
    "dir": "output_dir default_local_dir",
    "name": "run_name experiment_name",
    "trackers": "report_to logger",
    "path": "model_name model_name_or_path pretrained name",
    "train": "dataset dataset_name train_files",
    "validation": "eval_dataset val_files",
    "loss_aggregation": "loss_type loss_agg_mode",
    "kl_coef": "beta kl_beta kl_loss_coef init_kl_coef",
    "clip_ratio": "epsilon cliprange clip_range clip_eps",
    "clip_ratio_high": "epsilon_high clip_high",
    "rank": "r lora_r lora_rank",
    "eval": "evaluation",
    "rl": "ppo grpo gspo dapo",
    "gae": "ppo",
    "grpo": "dapo",
    "ppo_clip": "ppo grpo dapo",
}
"""Names of keys and backends here, each with the names that other trainers use for it."""


HOST_ALLOCATOR = "can't allocate memory"
"""What torch's RuntimeError says when the memory of the host is used up."""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that an accelerator or the host is out of memory; imports no torch."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and HOST_ALLOCATOR in str(error))


def errors_of(checks: Iterable[Callable[[], object]]) -> list[EngineError]:
    """Call functions that are independent of each other and return their errors."""
    found = []
    for check in checks:
        try:
            check()
        except EngineError as error:
            found.append(error)
    return found


def refuse(errors: Sequence[EngineError]) -> None:
    """Raise the first error with the messages of all, if there is one."""
    if errors:
        raise type(errors[0])("\n".join(map(str, errors))) if len(errors) > 1 else errors[0]


def names_elsewhere(name: str) -> list[str]:
    """Return what a name of another trainer is called here: ``lr`` for ``learning_rate``."""
    return [ours for ours, theirs in ELSEWHERE.items() if name.lower() in theirs.split()]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` most likely means, or None."""
    names = {known_name.lower(): known_name for known_name in known}
    if ours := [other for other in names_elsewhere(name) if other in names]:
        return ours[0]
    matches = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return names[matches[0]] if matches else None


def near(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with a leading space, to append to a sentence; "" if no known name is near."""
    match = nearest(name, known)
    return f" Did you mean '{match}'?" if match else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'? Known: a, b.`` with a leading space, to append to a sentence."""
    names = sorted(set(known))
    return f"{near(name, names)} Known: {', '.join(names) or 'none'}."
