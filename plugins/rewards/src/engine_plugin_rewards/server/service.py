"""One reward of a run file, or a reward model's folder, ready to score samples of clients."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.assemble import check_inputs, load_config, plugins_for
from engine_core.errors import ConfigError, DataError, did_you_mean
from engine_core.local.runtime import LocalRuntime
from engine_core.rewards import RewardRunner
from engine_core.rewards.signatures import SINGULAR
from engine_plugin_rewards.models.roles import model_rewards, reward_roles

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.rewards.signatures import Outcome


class RewardService:
    """A reward that scores batches one after the other. Thread-safe.

    Weight, clipping and normalization are the client's, and so is the handling of failures.

    Args:
        config: result of ``read_service``.

    Raises:
        EngineError: the reward does not load. Nothing is left running.
    """

    def __init__(self, config: EngineConfig) -> None:
        (chosen,) = config.reward
        self.name = chosen.name
        alone = chosen.model_copy(update={"on_error": "drop", "on_timeout": "drop", "max_failure_share": 1.0})
        self.config = config.model_copy(update={"reward": [alone]})
        self.plugins = plugins_for(config)
        self.scored = 0  # samples
        self._one_at_a_time = threading.Lock()
        groups: dict[str, Any] = {}
        models = model_rewards(self.config, self.plugins, lambda role: groups[role])
        self._runtime = LocalRuntime(self.config, self.plugins, {})
        self._runner = RewardRunner([alone], self.plugins, models=models)
        try:
            groups |= self._runtime.start(reward_roles(self.config), 0)
        except BaseException:
            self.close()
            raise

    def score(self, samples: Mapping[str, Sequence[Any]], count: int) -> list[Outcome]:
        """Return an outcome for each sample.

        Args:
            samples: ``prompts``, ``completions`` and columns of the data, each of ``count`` values.
            count: samples.

        Raises:
            DataError: the reward needs a column that was not sent.
        """
        with self._one_at_a_time:
            scorer = self._runner.scorers[0]
            assert scorer.runner.signature is not None
            columns = _arguments(self.name, scorer.runner.signature, samples)
            self._runner.ask({self.name: columns}, count, lambda *_: None)
            self.scored += count
            return [outcome for outcome in scorer.runner.outcomes if outcome is not None]

    def close(self) -> None:
        """End the workers and release the model."""
        self._runner.close()
        self._runtime.close()


def read_service(
    target: str, name: str | None, sets: Sequence[str] = (), allow_code: bool = False
) -> EngineConfig:
    """Return the config of a run with the reward to serve alone.

    Args:
        target: a run file, or a reward model's folder, which is then the only reward.
        name: the reward's name, for a folder.
        sets: ``KEY=VALUE``, as on any command line.
        allow_code: plugin files outside of the run file's folder are accepted.

    Raises:
        EngineError: the reward does not exist, or its inputs do not fit.
    """
    if Path(target).is_dir():
        table = {"name": name or "reward", "model": {"path": str(Path(target).resolve())}}
        config = load_config({"reward": [table]}, overrides=list(sets))
    else:
        config = load_config(target, overrides=list(sets), allow_code=allow_code)
    names = [reward.name for reward in config.reward]
    if not names:
        raise ConfigError("The file has no [[reward]], so there is nothing to serve.")
    if name is None and len(names) > 1:
        raise ConfigError(
            f"The file has several rewards: {', '.join(names)}. Choose one: --reward {names[0]}."
        )
    if name is not None and name not in names:
        raise ConfigError(f"--reward {name}: the file has no such reward.{did_you_mean(name, names)}")
    chosen = config.reward[names.index(name) if name is not None else 0]
    if problems := [line for line in check_inputs(config) if f"reward.{chosen.name}." in line]:
        raise DataError("\n".join(problems))
    return config.model_copy(update={"reward": [chosen]})


def _arguments(name: str, signature: Any, samples: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Select the arguments of the reward's function from the columns that were sent."""
    wanted = [*signature.names, *(samples if signature.all_columns else ())]
    if "completions" in samples:  # a client sends the whole response alone
        samples = {"last_turns": samples["completions"], **samples}
    found = {argument: samples.get(SINGULAR.get(argument, argument)) for argument in dict.fromkeys(wanted)}
    missing = [argument for argument in signature.required if found[argument] is None]
    if missing:
        raise DataError(
            f"Reward '{name}' needs '{missing[0]}', which was not sent.{did_you_mean(missing[0], samples)} "
            f'In the [reward.http] of the run: columns = ["{missing[0]}"].'
        )
    return {argument: values for argument, values in found.items() if values is not None}
