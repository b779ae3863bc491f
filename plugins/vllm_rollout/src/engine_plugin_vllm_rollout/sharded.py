"""Weights for an engine whose model is cut over several processes (`tensor_parallel_size`).

vLLM's own executor starts these processes. Whole tensors go through memory that all of them see, a bucket at a time
with its checksum; each process puts its part of every tensor where its own model wants it. What crosses the executor's
queue is names, shapes and places; no tensor is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_plugin_processes.buckets import checksum, fill, planned, unpacked
from engine_plugin_processes.sampler_process.memory import HostMemory

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

EXTENSION = f"{__name__}.Receiver"
"""What vLLM adds to the class of its workers."""


class Sharded:
    """The side of the engine: see the module.

    Args:
        engine: vLLM's.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._memory = HostMemory(HostMemory.new_file())

    def load(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Copy weights ``[D_1, D_2, ...]`` into the models' own tensors."""
        self._send(bucket, rebuild=False)

    def reload(self, weights: list[tuple[str, Tensor]]) -> None:
        """Load all weights ``[D_1, D_2, ...]`` as from a folder."""
        self._send(weights, rebuild=True)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()

    def _send(self, weights: list[tuple[str, Tensor]], rebuild: bool) -> None:
        place = planned(weights, 0)
        self._memory.reserve(place.size)
        fill(self._memory, place, weights)
        path = f"/proc/{os.getpid()}/fd/{self._memory.descriptor}"  # opened by processes of the same user
        entries = [list(entry) for entry in place.entries]
        self._engine.collective_rpc("take_weights", args=(path, place.size, entries, place.sum, rebuild))


class Receiver:
    """The side of a worker: its methods are those of vLLM's worker too."""

    def take_likeliest(self, keys: Sequence[str]) -> dict[str, list[float]]:
        """Return what ``LogMass`` recorded for these requests."""
        from engine_plugin_vllm_rollout.versions import log_mass_of

        return log_mass_of(self).take(keys)

    def take_weights(
        self, path: str, size: int, entries: Sequence[Sequence[Any]], expected: str, rebuild: bool
    ) -> None:
        """Copy this process's part of each tensor into its model.

        Args:
            path: the shared memory.
            size: bytes of it that are used.
            entries: name, type, shape and position of each tensor.
            expected: checksum of these bytes.
            rebuild: process each layer again; else copy into the model's own tensors.

        Raises:
            RuntimeError: other bytes came; no weight was changed.
        """
        from engine_plugin_vllm_rollout.copy_plan import CopyPlan
        from engine_plugin_vllm_rollout.versions import refresh_tied_head

        worker: Any = self
        data = torch.from_file(path, shared=True, size=size, dtype=torch.uint8) if size else torch.empty(0)
        if size and checksum(data) != expected:
            raise RuntimeError(f"Weights reached rank {worker.rank} of the sampler damaged.")
        weights = list(unpacked(data, entries))
        model = worker.model_runner.model
        if rebuild:
            worker.reload_weights(weights_iterator=iter(weights))
            if worker.device.type == "cpu":
                refresh_tied_head(model)
            return
        if not hasattr(self, "_plan"):
            self._plan = CopyPlan(model)
        self._plan.load(weights)
        if worker.device.type != "cpu":  # the memory is written again after this call
            torch.accelerator.synchronize(worker.device)
