"""Weight updates from a train engine to a rollout engine in the same process: the transport ``same_process``.

The train engine's stream goes directly into the sampler. If the sampler uses the train engine's own module, nothing
is sent. ``contracts.weight_transport`` is the contract of transports between processes; engine-plugin-processes
offers some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine_core.config import EngineConfig, RolloutConfig
    from engine_core.contracts.engines import TrainEngine


ADAPTER_CONFIG = "adapter_config.json"
"""The first name in an adapter's stream: the bytes ([n] uint8) of the config file that peft writes with an adapter."""
ADAPTER_PREFIX = "base_model.model."
"""The prefix of the names of an adapter's tensors."""


def sends_adapter(config: EngineConfig) -> bool:
    """Return whether the sampler gets only the adapter, because it has the base (its option `adapter`)."""
    return config.actor.lora is not None and bool(getattr(config.rollout.options, "adapter", False))


def stream_of(
    engine: TrainEngine, adapter: bool, to: str = "all", sampler: RolloutConfig | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a weight update. Collective: every rank must run it to its end.

    Args:
        engine: the actor.
        adapter: only its adapter, after ``ADAPTER_CONFIG`` [N] uint8; else the whole model with the adapter merged.
        to: as in ``named_weights``.
        sampler: the table of the sampler that receives the whole model; plugins may map the weights for it.
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
    for _ in weights:  # read what the plugin did not, because the stream is collective
        pass


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result of one update of a sampler's weights."""

    version: int  #: policy version of tokens sampled from now on
    bytes: int  #: received, by all processes together; 0 if the module is shared
    seconds: float  #: wall clock of the update
    checksum: str  #: of the weights that the sampler received; "shared" if the module is shared


def same_process(actor: Any, rollout: Any, version: int, shared: bool, adapter: bool = False) -> SyncResult:
    """Send the actor's weights to the sampler, both in this process.

    Args:
        actor: the TrainEngine that was updated.
        rollout: the RolloutEngine that receives the weights.
        version: the new policy version.
        shared: whether the sampler reads the actor's own module.
        adapter: the result of ``sends_adapter``.

    Returns:
        The result of the update. If the stream fails half way, the sampler raises and keeps its old version.
    """
    start = time.perf_counter()
    if shared:
        rollout.set_version(version)
        return SyncResult(version, 0, time.perf_counter() - start, "shared")
    received = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded weights ``[D1, ..., Dn]`` and count their bytes."""
        nonlocal received
        for name, tensor in stream_of(actor, adapter, sampler=rollout.config):
            received += tensor.nbytes
            yield name, tensor

    checksum = rollout.update_weights(counted(), version)
    return SyncResult(version, received, time.perf_counter() - start, checksum)


def rounded(stream: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with floating-point tensors ``[D1, ..., Dn]`` of larger types cast to ``dtype``; None: no type is larger."""
    for name, tensor in stream:
        larger = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize
        yield name, tensor.to(dtype) if larger else tensor


def common_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """Return the floating-point type of tensors ``[D1, ..., Dn]``; None if they have several."""
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def buckets(
    stream: Iterable[tuple[str, Tensor]], limit: int, bytes_of: Callable[[Tensor], int] | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of successive tensors of at most ``limit`` bytes in total; a larger tensor is alone in its list.

    Args:
        stream: names and tensors ``[D1, ..., Dn]``.
        limit: bytes of one list.
        bytes_of: returns the bytes to count for a tensor; default: its own size.
    """
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in stream:
        size = tensor.nbytes if bytes_of is None else bytes_of(tensor)
        if bucket and held + size > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield bucket
