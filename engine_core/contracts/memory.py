"""The device memory of a role, as its backend estimates it before anything is built (``memory_need`` of an engine)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MemoryQuestion:
    """The facts about a run that an estimate needs in addition to the role's tables.

    Attributes:
        role: name of the role, for its engine.
        trainable: the role has an optimizer.
        frozen: the run never changes the weights.
        ranks: processes of the role, one for each device.
        device_bytes: memory of one device.
        free: bytes that other roles leave to this role, by which keys with ``"auto"`` are chosen; None: not known yet.
        tokens: maximum tokens of a mini-batch on one rank; None: not known.
        length: maximum tokens of a sequence; None: not known.
        sequences: maximum responses that one device samples at the same time; None: not known.
    """

    role: str
    trainable: bool = False
    frozen: bool = False
    ranks: int = 1
    device_bytes: int = 0
    free: int | None = None
    tokens: int | None = None
    length: int | None = None
    sequences: int | None = None


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes of a role on one device, by part.

    Attributes:
        kept: parts that stay in every phase, such as weights.
        idle: parts that stay unless the role sleeps: optimizer state, KV cache.
        working: parts that exist while the role works: gradients, activations.
        moving: bytes in addition while weights are sent to a sampler.
        reserve: bytes to leave unused while the role works, against fragmentation.
        saved: bytes of the role in a checkpoint, of all ranks together; None: unknown.
        least: bytes of ``working`` with the smallest values that the role's ``"auto"`` keys allow.
        unknown: parts that the backend cannot estimate.
        chosen: keys with ``"auto"`` and their values, by name in the role's table, such as ``fsdp.activation_checkpointing``.
    """

    kept: Mapping[str, int] = field(default_factory=dict)
    idle: Mapping[str, int] = field(default_factory=dict)
    working: Mapping[str, int] = field(default_factory=dict)
    moving: int = 0
    reserve: int = 0
    saved: int | None = None
    least: int = 0
    unknown: tuple[str, ...] = ()
    chosen: Mapping[str, Any] = field(default_factory=dict)
