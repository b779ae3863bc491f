"""A rollout engine in separate processes, optionally with another Python environment (``[rollout.process]``).

``engine.SamplerEngine`` takes the engine's place in the worker that owns it, and ``weights`` sends the weights.
``build`` runs in the separate processes, which are workers like those of a runtime (``worker``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import RolloutEngine, WorkerContext
    from engine_core.plugins.plugin_set import Plugin, PluginSet
    from engine_core.specs import RolloutBackend


class SamplerProcesses:
    """The part ``sampler_process``, as in ``engine_core.contracts.parts``."""

    @staticmethod
    def make(
        config: RolloutConfig,
        model_config: ModelConfig,
        context: WorkerContext,
        source: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> RolloutEngine:
        """Return the sampler of ``[rollout.process]``, which runs in separate processes.

        Args:
            config: the ``[rollout]`` table.
            model_config: the ``[model]`` table.
            context: context of the worker that owns the sampler.
            source: streams the actor's weights [D_1, D_2, ...] to a replaced process; None: the sampler keeps a copy.
        """
        from engine_plugin_processes.sampler_process.engine import SamplerEngine

        return SamplerEngine(config, model_config, context, source)

    @staticmethod
    def foreign_plugin(python: str, name: str, plugins: PluginSet) -> tuple[RolloutBackend, Plugin]:
        """Return a rollout engine of another environment, and its plugin, by ``foreign_interpreter``."""
        from engine_plugin_processes.foreign_interpreter import foreign_plugin

        return foreign_plugin(python, name, plugins)
