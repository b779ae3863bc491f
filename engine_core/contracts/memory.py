"""The device memory and speed of a role, as its backend estimates them before anything is built (``memory_need`` of an engine)."""

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
    """The bytes of a role on one device, by part, and its speed.

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
        speed: of the role's work; None: unknown.
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
    speed: PassSpeed | DecodeSpeed | None = None


@dataclass(frozen=True)
class PassSpeed:
    """The speed of a model's passes relative to the limits of a device, as the backend has measured it.

    A forward and backward pass takes the sum of its matrix products, its attention, and the bytes that other operations
    move. A forward pass alone takes a third.

    Attributes:
        products: share of the device's dense bf16 rate that matrix products reach.
        attention: the same of attention.
        traffic: bytes that a token moves, for each element of a layer's hidden, feed-forward and query vectors.
        layer: seconds of each layer in an optimizer step, whatever its tokens.
        repeated: share of the layers that are recomputed in the backward pass.
        source: where that was measured, for people.
    """

    products: float
    attention: float
    traffic: float
    layer: float
    repeated: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class DecodeSpeed:
    """The speed of sampling relative to the limits of a device, as the backend has measured it; bytes are those of one device.

    Attributes:
        weights: bytes that each decode step reads, whatever its sequences.
        token: bytes of the cache for a token.
        together: maximum sequences of a decode step.
        reading: share of the memory's bandwidth that reading the cache reaches.
        step: seconds of a decode step in addition.
        sequence: seconds of each sequence in a decode step, in addition.
        products: share of the device's dense bf16 rate that prompts reach.
        update: seconds for each byte of new weights; 0 if the sampler uses the actor's weights.
        source: where that was measured, for people.
    """

    weights: int
    token: int
    together: int
    reading: float
    step: float
    sequence: float = 0.0
    products: float = 1.0
    update: float = 0.0
    source: str = ""
