"""A rollout engine in a process of its own, with the environment of another Python if wanted (``[rollout.process]``).

``engine.SamplerEngine`` stands where the engine would stand, in the process of the worker that owns it, and ``weights`` sends its
processes the weights; ``build`` runs in these processes, which are workers as those of a runtime (``worker``).
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
    """The part ``sampler_process``; see ``engine_core.contracts.parts``."""

    @staticmethod
    def make(
        config: RolloutConfig,
        model_config: ModelConfig,
        context: WorkerContext,
        source: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> RolloutEngine:
        """Return the sampler that ``[rollout.process]`` asks for, in processes of its own.

        Args:
            config: the ``[rollout]`` table.
            model_config: the ``[model]`` table.
            context: of the worker that owns it.
            source: streams the actor's weights to a process that is started again; None: the sampler keeps a copy.
        """
        from engine_plugin_processes.sampler_process.engine import SamplerEngine

        return SamplerEngine(config, model_config, context, source)

    @staticmethod
    def foreign_plugin(python: str, name: str, plugins: PluginSet) -> tuple[RolloutBackend, Plugin]:
        """Return a rollout engine as the environment of another interpreter offers it; see ``foreign_interpreter``."""
        from engine_plugin_processes.foreign_interpreter import foreign_plugin

        return foreign_plugin(python, name, plugins)
