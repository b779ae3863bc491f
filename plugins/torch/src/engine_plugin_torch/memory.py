"""The estimate of the device memory of a role: the constant part, and the bytes that each token of a micro-batch adds.

A dense decoder keeps the following for the backward pass, per layer and token. H is the hidden size, F the width of the
feed-forward, q and k are the query and key heads times their size. ``e`` is the bytes of the compute type, ``s`` the
bytes of the residual stream between layers.

| part | not compiled | compiled |
|---|---|---|
| two norms and the inputs of the linear layers | ``2 (in + normalized) + reads`` H | ``4 s`` H |
| norms of queries and keys, if any | ``(4 + e)`` (``2 e`` in float32) (q + k) | ``e`` (q + k) |
| attention: queries, keys, values, result, log of sums | ``4 e`` q + 4 per head | the same |
| feed-forward, gated | ``4 e`` F | ``3 e`` F |
| feed-forward, plain | ``2 e`` F, ``5 e`` F if the activation runs as several kernels | ``2 e`` F |

With activation checkpointing each layer keeps its input, ``s`` H, and one layer at a time keeps the rest. Not counted,
and covered by ``RESERVE``: workspaces of kernels, fragmentation, gradients in flight within a layer. Mixtures of
experts and other kinds of models have no estimate. The counts are those of an accelerator's operators; some norms and
attention kernels of the CPU keep other amounts. plugins/torch/tests/test_memory.py compares the counts with the tensors
that autograd keeps, except for these CPU kernels. The compiled counts are compared with figures of an H200 in
benchmarks/train/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.local.device_memory import device_bytes
from engine_core.model_config import is_dense
from engine_plugin_torch.sharded import here

GIB = 1024**3
RESERVE = 0.15  # share of free memory that stays unused
ON_CPU = 8192  # tokens of a micro-batch without an estimate
MOST = 65536  # larger micro-batches are no faster
FEW = 8192  # if fewer tokens than this fit, recomputing activations pays off (benchmarks/train/README.md)
ROUND = 512  # tokens

IN_STEPS = frozenset({"gelu_new", "gelu_fast", "quick_gelu", "gelu_python"})  # they run as several kernels
# model types in which one layer computes queries, keys and values
FUSED_QUERIES = frozenset({"gpt2", "gpt_neox", "gpt_bigcode", "phi3"})


@dataclass(frozen=True)
class Held:
    """The constant bytes on one rank, independent of the batch."""

    weights: int  #: of this rank
    gradients: int = 0  #: of the trained weights
    optimizer: int = 0  #: state of the optimizer
    gathered: int = 0  #: weights of other ranks, or cast to another type, while they are used

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.gathered

    @classmethod
    def of(cls, module: nn.Module, trained: bool) -> Held:
        """Count the bytes of a module on one rank; the optimizer is Adam, with two numbers per weight."""
        weights = _bytes(module.parameters())
        learned = _bytes(p for p in module.parameters() if p.requires_grad) if trained else 0
        return cls(weights, learned, 2 * learned)


@dataclass(frozen=True)
class Decoder:
    """The shape of a dense decoder."""

    hidden: int  #: H
    wide: int  #: F
    layers: int  #: number of decoder layers
    queries: int  #: query heads times their size
    keys: int  #: key heads times their size
    heads: int  #: of queries
    vocabulary: int  #: V
    gated: bool  #: a feed-forward of three matrices
    rms: bool  #: RMS norms, which run as several kernels; else layer norms, which run as one
    normed: bool  #: queries and keys are normalized
    in_steps: bool  #: the activation runs as several kernels
    reads: int  #: linear layers that read the normalized stream, in attention and feed-forward

    @classmethod
    def of(cls, module: nn.Module) -> Decoder | None:
        """Read the shape from a transformers model's config and layer names; None if it is no dense decoder."""
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "get_text_config"):
            return None
        text = config.get_text_config(decoder=True)
        try:
            hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
            kind, vocabulary = text.model_type, text.vocab_size
        except AttributeError:
            return None
        if not is_dense(text.to_dict()):
            return None
        size = getattr(text, "head_dim", None) or hidden // heads
        names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
        wide = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden
        gated = "gate_proj" in names or "gate_up_proj" in names
        activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)
        return cls(
            hidden=hidden,
            wide=wide,
            layers=layers,
            queries=heads * size,
            keys=(getattr(text, "num_key_value_heads", None) or heads) * size,
            heads=heads,
            vocabulary=vocabulary,
            gated=gated,
            rms=not any(isinstance(part, nn.LayerNorm) for part in module.modules()),
            normed="q_norm" in names,
            in_steps=activation in IN_STEPS,
            reads=(1 if kind in FUSED_QUERIES else 3) + (1 + gated if "gate_up_proj" not in names else 1),
        )


@dataclass(frozen=True)
class Settings:
    """The settings of a role that its memory depends on.

    Attributes:
        param: type of the weights.
        compute: type of the forward pass.
        chunk: rows of logits at one time; 0 for a role without logits.
        recompute: logits are computed again in the backward pass.
        compiled: layers and log-probs are compiled.
        kernel: attention uses the kernel for packed sequences, with keys and values repeated to the number of query
            heads; else it uses rectangles.
        adapter: bytes that LoRA adapters keep in addition, per layer and token (``adapter_bytes``); over 0 means that
            all other weights are frozen: no input is kept for their gradients.
        head: the head's weight is trained.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    chunk: int = 1024
    recompute: bool = True
    compiled: bool = False
    kernel: bool = False
    adapter: int = 0
    head: bool = False


@dataclass(frozen=True)
class Activations:
    """The bytes that the tokens of a micro-batch need, by the formulas of this module.

    Attributes:
        layer: bytes kept per layer and token.
        carried: bytes kept per layer and token with activation checkpointing.
        layers: number of layers.
        ends: bytes per token before the first and behind the last layer.
        chunks: constant bytes of one chunk of logits.
        copies: bytes of the layers' weights in the compute type, if autocast copies them.
        passing: bytes per token that exist at one time in a pass without gradient.
        head: bytes of the head's weight in the compute type and of its gradients in flight, if it is trained.
    """

    layer: int
    carried: int
    layers: int
    ends: int
    chunks: int
    copies: int
    passing: int
    head: int = 0

    @property
    def constant(self) -> int:
        """Bytes that do not depend on the number of tokens."""
        return self.chunks + self.copies + self.head

    def token(self, recomputed: float) -> int:
        """Return the bytes of one token in training.

        Args:
            recomputed: share of the layers that keep only their input.
        """
        layers = self.layers * (recomputed * self.carried + (1 - recomputed) * self.layer)
        return int(layers) + (self.layer if recomputed else 0) + self.ends

    def fitting(self, free: int, recomputed: float, trained: bool = True) -> int:
        """Return how many tokens of a micro-batch fit into ``free`` bytes, 0 or more."""
        each = self.token(recomputed) if trained else self.passing
        return max(0, int((free * (1 - RESERVE) - self.constant) // each))


def activations(shape: Decoder, how: Settings) -> Activations:
    """Compute the bytes that the tokens of a micro-batch need, by the formulas of this module."""
    e, s = how.compute.itemsize, max(how.compute.itemsize, how.param.itemsize)
    cast = how.param.itemsize > how.compute.itemsize
    stream = _stream(shape, how, e, s, cast)
    normed = shape.normed * (shape.queries + shape.keys)
    if how.adapter and not how.compiled:
        normed *= 4
    else:
        normed *= e if how.compiled else (2 * e if e >= 4 else 4 + e)
    attention = 4 * e * shape.queries + 4 * shape.heads
    if not how.kernel:
        attention = e * (3 * shape.queries + 2 * shape.keys) + 4 * shape.heads
    wide = e * shape.wide * (_wide(shape, how.compiled) - _copied(how, e))
    logits = how.chunk * shape.vocabulary * (e if how.compiled else 12 + e)
    # the last norm, and the input of the head
    rows = (1 if how.adapter else 2 + shape.rms) * s * shape.hidden
    return Activations(
        layer=stream + normed + attention + wide + how.adapter,
        carried=s * shape.hidden,
        layers=shape.layers,
        ends=rows + 24 + (0 if how.recompute or not how.chunk else e * shape.vocabulary),
        chunks=logits,
        copies=cast * e * _matrices(shape),
        passing=4 * s * shape.hidden + attention + wide,
        head=how.head * (2 + cast) * e * shape.vocabulary * shape.hidden,
    )


def adapter_bytes(module: nn.Module, layers: int, copied: bool) -> int:
    """Return the bytes that the LoRA adapters in a module keep per layer and token.

    Each adapter keeps the product with its first matrix, and a float32 copy of its input if that has a smaller type;
    compiled code makes the copy again.

    Args:
        module: with adapters; without any the answer is 0.
        layers: number of decoder layers.
        copied: the input has a smaller type, and layers are not compiled.
    """
    inner = [a for part in module.modules() for a in getattr(part, "lora_A", {}).values()]
    linear = [a for a in inner if isinstance(a, nn.Linear)]
    return sum(4 * (copied * a.in_features + a.out_features) for a in linear) // layers


def _stream(shape: Decoder, how: Settings, e: int, s: int, cast: bool) -> int:
    """Return the bytes per token of a layer's norms and of the linear layers' inputs."""
    if how.compiled:
        return 4 * s * shape.hidden
    if how.adapter:  # frozen norms keep their input; the inputs of linear layers are kept by adapters
        return (2 * (4 if shape.rms else s) + 2 * e * (not _copied(how, e))) * shape.hidden
    read = shape.reads if cast else 2  # autocast makes a copy for each layer that reads its input
    normalised = 0 if not shape.rms else (4 if cast or e >= 4 else e)
    before = 4 if shape.rms else s  # an RMS norm is computed in float32
    return (2 * (before + normalised) + read * e) * shape.hidden


def _copied(how: Settings, e: int) -> bool:
    """Return whether adapters keep float32 copies of their inputs instead of the inputs."""
    return bool(how.adapter) and not how.compiled and e < 4


def _wide(shape: Decoder, compiled: bool) -> int:
    if shape.gated:
        return 3 if compiled else 4
    return 5 if shape.in_steps and not compiled else 2


def _matrices(shape: Decoder) -> int:
    """Return the number of weights in the layers' matrices."""
    attention = shape.hidden * (2 * shape.queries + 2 * shape.keys)
    return shape.layers * (attention + (3 if shape.gated else 2) * shape.hidden * shape.wide)


@dataclass(frozen=True)
class Estimate:
    """The memory that a role needs and the memory that is available.

    Attributes:
        held: constant bytes of the role.
        activations: bytes of the tokens.
        free: bytes available to the role, including the bytes that it holds already; None where it is not known.
    """

    held: Held
    activations: Activations
    free: int | None = None

    @property
    def left(self) -> int:
        """Bytes left for activations."""
        return max(0, (self.free or 0) - self.held.total)

    def checkpointing(self, wanted: int) -> bool:
        """Return whether activations should be recomputed because ``wanted`` tokens would not fit otherwise."""
        return self.activations.fitting(self.left, False) < wanted

    def budget(self, recomputed: float, trained: bool = True) -> int:
        """Return the tokens of a micro-batch, a multiple of ``ROUND``; ``recomputed`` as for ``Activations.token``."""
        tokens = min(self.activations.fitting(self.left, recomputed, trained), MOST)
        return max(ROUND, tokens // ROUND * ROUND)

    def table(self) -> list[tuple[str, str]]:
        """Return names and sizes as text, for logs."""
        held, act = self.held, self.activations
        rows = [("weights", held.weights), ("gradients", held.gradients), ("optimizer", held.optimizer)]
        rows.append(("gathered weights", held.gathered))
        lines = [
            (name, f"{size / GIB:.2f} GiB")
            for name, size in (*rows, ("chunks of logits", act.chunks), ("copies", act.copies))
            if size
        ]
        lines.append(("a token", f"{act.token(False) / 1024:.1f} KiB"))
        lines.append(("a token, recomputed", f"{act.token(True) / 1024:.1f} KiB"))
        return lines + (
            [] if self.free is None else [("free, with what is held", f"{self.free / GIB:.2f} GiB")]
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None where it does not report them (the CPU)."""
    total = device_bytes(device)
    if total is None:
        return None
    held, used = torch.accelerator.memory_reserved(device), torch.accelerator.memory_allocated(device)
    free = int(torch.get_device_module(device).mem_get_info(device)[0])
    return min(free, total - held) + held - used


def _bytes(parameters: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in parameters)


def optimizer_bytes(optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Return the bytes of the optimizer's state that lie on a device already, on one rank."""
    values: Sequence[Any] = [] if optimizer is None else [*optimizer.state.values()]
    held = [here(tensor) for state in values for tensor in state.values() if isinstance(tensor, Tensor)]
    return _bytes(tensor for tensor in held if tensor.device.type == device.type)
