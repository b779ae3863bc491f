"""Weights from a train engine to a rollout engine of the same process: the transport ``same_process``.

The stream of the train engine goes straight into the sampler, or nothing moves where the sampler uses the train
engine's own module. ``contracts.weight_transport`` is the contract of transports between processes; engine-plugin-processes has
some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.config import EngineConfig, RolloutConfig
    from engine_core.contracts.engines import TrainEngine


ADAPTER_CONFIG = "adapter_config.json"
"""In a stream of an adapter, before its tensors: the bytes [n] uint8 of the file that peft writes beside them."""
ADAPTER_PREFIX = "base_model.model."
"""Of the names of an adapter's tensors."""


def sends_adapter(config: EngineConfig) -> bool:
    """Whether the sampler has the base and gets the adapter alone: `adapter` among its options says so."""
    return config.actor.lora is not None and bool(getattr(config.rollout.options, "adapter", False))


def stream_of(
    engine: TrainEngine, adapter: bool, to: str = "all", sampler: RolloutConfig | None = None
) -> Iterator[tuple[str, Tensor]]:
    """What a sampler is brought up to date with. Collective: every rank runs it to its end.

    Args:
        engine: the actor.
        adapter: its adapter alone, with ``ADAPTER_CONFIG``; else the whole model, an adapter merged into it.
        to: as ``named_weights``.
        sampler: the table of the sampler that takes the whole model; plugins may map the weights for it.
    """
    if adapter:
        import torch

        yield ADAPTER_CONFIG, torch.frombuffer(bytearray(engine.adapter_config()), dtype=torch.uint8)
        yield from engine.named_weights(to=to, adapter=True)
        return
    weights, mapped = iter(engine.named_weights(to=to)), None
    if sampler is not None:
        backends = (("rollout_engines", sampler.backend), ("train_engines", engine.config.backend))
        mapped = engine.context.plugins.step("rollout", *backends).engine_map_weights(
            sampler=sampler.backend,
            weights=weights,
            model_config=engine.model_config,
            options=sampler.options,
        )
    yield from weights if mapped is None else mapped
    for _ in weights:  # collective: what the plugin did not read
        pass


@dataclass(frozen=True, slots=True)
class SyncResult:
    """One update of a sampler's weights."""

    version: int  # policy version of tokens sampled from now on
    bytes: int  # taken, over all processes; 0 where the module is shared
    seconds: float
    checksum: str  # of what the sampler received; "shared" where the module is shared


def same_process(actor: Any, rollout: Any, version: int, shared: bool, adapter: bool = False) -> SyncResult:
    """Bring the sampler to the actor's weights, both in this process.

    Args:
        actor: the TrainEngine that was updated.
        rollout: the RolloutEngine to bring up to date.
        version: the new policy version.
        shared: the sampler reads the actor's own module.
        adapter: as ``sends_adapter``.

    Returns:
        What was moved. When the stream fails half way the sampler raises and keeps its old version.
    """
    start = time.perf_counter()
    if shared:
        rollout.set_version(version)
        return SyncResult(version, 0, time.perf_counter() - start, "shared")
    counter = _Counted(stream_of(actor, adapter, sampler=rollout.config))
    checksum = rollout.update_weights(counter, version)
    return SyncResult(version, counter.bytes, time.perf_counter() - start, checksum)


class _Counted:
    """Passes a weight stream on and counts its bytes."""

    def __init__(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        self._stream = stream
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stream:
            self.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor


def buckets(
    stream: Iterable[tuple[str, Tensor]], limit: int, bytes_of: Callable[[Tensor], int] | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Neighbours that together take at most ``limit`` bytes; a larger tensor is alone.

    Args:
        bytes_of: of one tensor; by default those that it has.
    """
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size() if bytes_of is None else bytes_of(tensor)
        if bucket and held + size > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket
