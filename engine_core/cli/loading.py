"""Loaders of the config and the trainer that a command's arguments name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.assemble import check_inputs, load_config, plugins_for
from engine_core.config.completeness import check_complete
from engine_core.config.dump import as_data, leaves
from engine_core.config.read import RawConfig, key_text
from engine_core.config.wording import placed
from engine_core.errors import (
    ConfigError,
    DataError,
    EngineError,
    EnvironmentProblem,
    PluginError,
    errors_of,
    refuse,
)
from engine_core.redaction import REDACTED
from engine_core.rewards.preflight import check_rewards
from engine_core.rewards.signatures import check_function

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.config.rewards import RewardConfig
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.runs.tracking import RunFolder


PLAIN = (ConfigError, DataError, PluginError, EnvironmentProblem)


def read(
    files: Sequence[str],
    sets: Sequence[str] | None = None,
    steps: int | None = None,
    allow_code: bool = False,
) -> EngineConfig:
    """Return the validated config of a command's arguments; ``steps`` means ``--set run.steps=N``."""
    overrides = [*(sets or ()), *([] if steps is None else [f"run.steps={steps}"])]
    return load_config(*files, overrides=overrides, allow_code=allow_code)


def read_run(folder: RunFolder, sets: list[str] | None, steps: int | None = None) -> EngineConfig:
    """Return the config that a run was last started or resumed with, changed by ``sets`` and ``steps``.

    The plugin files that the config names were allowed when the run was started, and they have absolute paths.
    They are therefore allowed again; their hashes are logged.
    """
    file = str(folder.config_file)
    config = read([file], sets=sets, steps=steps, allow_code=True)
    config._source.unread.clear()  # the file has every key, so a report of unread ones is useless
    return config


def check_secrets(config: EngineConfig) -> None:
    """Refuse the config of a run that has ``[redacted]`` in place of a secret which no option sets again.

    Raises:
        ConfigError: names each key.
    """
    origins = config._source.origins if config._source else {}
    lost = [
        key
        for path, value in leaves(as_data(config))
        if REDACTED in str(value) and (origin := origins.get(key := key_text(path))) and origin.file
    ]
    if lost:
        raise ConfigError(
            [
                f"{key}: the run's config has {REDACTED} for a secret. Set it again: --set {key}=..."
                for key in lost
            ]
        )


def chosen_checkpoint(folder: RunFolder, step: str | None, config: EngineConfig) -> Path:
    """Return the verified checkpoint of a run that ``--step`` names.

    Args:
        folder: the run.
        step: a step's number or ``best``; None: the newest.
        config: its ``checkpoint.best_metric`` ranks the checkpoints for ``best``.

    Raises:
        ConfigError: ``step`` is neither.
        DataError: the run has no such usable checkpoint.
    """
    from engine_core.runs.checkpoint import Checkpoints

    if step == "best":
        return Checkpoints(folder.checkpoints, config.checkpoint, folder.metrics_of).chosen(best=True)
    if step is not None and not step.isdecimal():
        raise ConfigError(f"--step: got '{step}', expected the number of a step or 'best'.")
    return Checkpoints(folder.checkpoints).chosen(None if step is None else int(step))


def load_trainer(config: EngineConfig, **live: Any) -> Any:
    """Return the trainer that the config names. Models are built later, in its ``setup`` or ``train``.

    Args:
        config: from ``load_config``.
        live: ``model``, ``tokenizer``, ``rewards`` or ``data`` of this program, as for ``Trainer``.

    Raises:
        EngineError: every problem of the config and of the files that it names.
    """
    refuse(check_config(config, live))
    with placing(config):
        return plugins_for(config).resolve("trainers", config.trainer)(config, **live)


def check_config(config: EngineConfig, live: Collection[str] = ()) -> list[EngineError]:
    """Return the errors of a valid config that show without torch: missing keys, rewards, files and folders.

    Args:
        config: from ``load_config``.
        live: what the program passes instead of keys of the run file.
    """
    plugins = plugins_for(config)
    trainer: Any = plugins.spec("trainers", config.trainer)
    sections = trainer.sections_for(config.eval.during_training)
    reads_rewards = not sections or "reward" in sections
    checks = [
        partial(check_complete, config, live, plugins),
        *(partial(_check_reward, config, reward, plugins) for reward in config.reward if reads_rewards),
        partial(_check_files, config),
    ]
    return errors_of(checks)


@contextmanager
def placing(config: EngineConfig) -> Iterator[None]:
    """Raise an error of the block with file and line before each message that begins with a key of the run file."""
    source = config._source or RawConfig({})
    try:
        yield
    except PLAIN as error:
        lines = [placed(line, source, only_known=True) for line in str(error).splitlines()]
        if type(error) not in PLAIN or "\n".join(lines) == str(error):
            raise
        raise type(error)("\n".join(lines)) from error


def _check_reward(config: EngineConfig, reward: RewardConfig, plugins: PluginSet) -> None:
    """Check that a reward function can be called, and what its plugin checks; messages begin with the line of its table."""
    try:
        check_function(reward, plugins)
        check_rewards([reward], plugins)
    except EngineError as error:
        source = config._source or RawConfig({})
        lines = [placed(f"reward.{reward.name}: {line}", source) for line in str(error).splitlines()]
        raise type(error)("\n".join(lines)) from error


def _check_files(config: EngineConfig) -> None:
    if problems := check_inputs(config):
        raise DataError("\n".join(problems))


def print_unread(config: EngineConfig) -> None:
    """Print the tables of the run file that the run does not read, one line each."""
    for entry in config.unread:
        print(f"not read: {entry}")
