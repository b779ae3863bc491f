"""The stages of a run: made once, called in the order of the run file, and what they keep from step to step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from engine_core.errors import PluginError
from engine_core.runs.rollout_files import read_rollouts, write_rollouts
from engine_core.specs import RefillOptions
from engine_core.types import StageState

if TYPE_CHECKING:
    from engine_core.config.models import StageConfig
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Rollout

log = logging.getLogger("engine")


class Stages:
    """Every ``[[stage]]`` of a run.

    Args:
        configs: in the order of the run file.
        plugins: that offer them.

    Raises:
        PluginError: one that cannot be called.
    """

    def __init__(self, configs: Sequence[StageConfig], plugins: PluginSet) -> None:
        self.calls: dict[str, Callable[..., Any]] = {}
        self.keeping: dict[str, Any] = {}  # those that are objects
        for config in configs:
            own = set(RefillOptions.model_fields) if isinstance(config.options, RefillOptions) else set()
            options = config.options.model_dump(exclude=own) if config.options else {}
            found = plugins.function("stages", config.name)
            self.calls[config.name] = partial(found, **options)
            if isinstance(plugins.resolve("stages", config.name), type):
                made = self.keeping[config.name] = found(**options)
                self.calls[config.name] = plugins.guarded("stages", config.name, made)
        self.off_policy = any(plugins.spec("stages", config.name).off_policy for config in configs)  # type: ignore[attr-defined]

    def run(
        self, configs: Sequence[StageConfig], rollouts: list[Rollout], step: int
    ) -> tuple[list[Rollout], dict[str, float]]:
        """Call these stages one after another; the rollouts that go on, and ``stage/NAME/...`` metrics."""
        metrics: dict[str, float] = {}
        for name in (config.name for config in configs):
            made = self.calls[name](rollouts, step)
            if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
                raise PluginError(
                    f"Stage '{name}' must return (rollouts, metrics), a list and a dict; it returned {type(made).__name__}."
                )
            rollouts, noted = made
            metrics |= {f"stage/{name}/{key}": value for key, value in noted.items()}
        return rollouts, metrics

    def state(self) -> dict[str, Any]:
        """The plain values that the stages keep, by name."""
        return {name: copy.deepcopy(self._state(name).values) for name in self.keeping}

    def files(self) -> dict[str, Callable[[Path], object]]:
        """What writes the rollouts that they keep now, by the name of the file."""
        held = {name: tuple(self._state(name).rollouts) for name in self.keeping}
        return {_file(name): partial(write_rollouts, step=0, rollouts=kept) for name, kept in held.items()}

    def load(self, values: Mapping[str, Any], folder: Path) -> None:
        """Give the stages what a checkpoint holds of them; one that it does not know begins empty."""
        for name, stage in self.keeping.items():
            if name not in values:
                log.warning(
                    "Stage '%s' was not there when the checkpoint was written: it begins empty.", name
                )
                continue
            stage.load_state(StageState(values[name], read_rollouts(folder / _file(name))))

    def _state(self, name: str) -> StageState:
        state = self.keeping[name].state()
        if not isinstance(state, StageState):
            raise PluginError(
                f"Stage '{name}': state() must return a StageState, got {type(state).__name__}."
            )
        return state


def _file(name: str) -> str:
    return f"stages/{quote(name, safe='')}.parquet"
