"""A rollout engine in separate processes, optionally with another Python environment (``[rollout.process]``).

``engine.SamplerEngine`` takes the engine's place in the worker that owns it, and ``weights`` sends the weights.
``build`` runs in the separate processes, which are workers like those of a runtime (``worker``).
"""

from __future__ import annotations

from typing import Any


class SamplerProcesses:
    """The part ``sampler_process``; ``engine_core.contracts.parts`` has the arguments and results of its functions."""

    @staticmethod
    def make(*given: Any) -> Any:
        """Start the processes of ``[rollout.process]``; return their sampler."""
        from engine_plugin_processes.sampler_process.engine import SamplerEngine

        return SamplerEngine(*given)

    @staticmethod
    def foreign_plugin(*given: Any) -> Any:
        """Return a rollout engine of another environment, and its plugin, by ``foreign_interpreter``."""
        from engine_plugin_processes.foreign_interpreter import foreign_plugin

        return foreign_plugin(*given)
