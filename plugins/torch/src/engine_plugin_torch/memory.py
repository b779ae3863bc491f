"""How much device memory a role needs: what is held whatever is computed, and what each token of a micro-batch adds.

A dense decoder keeps, for the backward pass of one layer and token (H hidden size, F width of the feed-forward,
q and k the query and key heads times their size; ``e`` bytes of the type that it computes in, ``s`` of the stream
between layers):

| part | run as it is | compiled |
|---|---|---|
| two norms and what the linear layers read | ``2 (in + normalised) + reads`` H | ``4 s`` H |
| norms of queries and keys, where there are any | ``(4 + e)`` (``2 e`` in float32) (q + k) | ``e`` (q + k) |
| attention: queries, keys, values, result, log of sums | ``4 e`` q + 4 a head | the same |
| feed-forward, gated | ``4 e`` F | ``3 e`` F |
| feed-forward, plain | ``2 e`` F, ``5 e`` F where the activation is written in steps | ``2 e`` F |

With activation checkpointing a layer keeps its input, ``s`` H, and one layer at a time the rest. Left out, and covered
by ``RESERVE``: workspaces of kernels, fragments, gradients on their way through a layer. Mixtures of experts and
models of other kinds have no estimate. The counts are of an accelerator's operators: norms and attention that the CPU
computes in ways of its own keep other amounts. They are held against tensors that autograd really keeps in
plugins/torch/tests/test_memory.py, where the CPU's own ways are left out, the compiled ones against figures of an H200
in benchmarks/train/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine_plugin_torch.sharded import here

GIB = 1024**3
RESERVE = 0.15  # share of free memory that is left alone
ON_CPU = 8192  # tokens of a micro-batch where nothing is known of memory, or of the model
MOST = 65536  # larger micro-batches are no faster
FEW = 16384  # with fewer tokens than that, recomputing activations is worth its time
ROUND = 512  # tokens

IN_STEPS = frozenset({"gelu_new", "gelu_fast", "quick_gelu", "gelu_python"})  # activations of several kernels
# one layer makes queries, keys and values
FUSED_QUERIES = frozenset({"gpt2", "gpt_neox", "gpt_bigcode", "phi3"})


@dataclass(frozen=True)
class Held:
    """Bytes on one rank, whatever is computed."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # weights of other ranks, or of another type, while they are used

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered

    @classmethod
    def of(cls, module: nn.Module, trained: bool) -> Held:
        """Of a module on one rank; the optimizer is Adam, with two numbers a weight."""
        weights = _bytes(module.parameters())
        learned = _bytes(p for p in module.parameters() if p.requires_grad) if trained else 0
        return cls(weights, learned, 2 * learned)


@dataclass(frozen=True)
class Decoder:
    """The shape of a dense decoder."""

    hidden: int  # H
    wide: int  # F
    layers: int
    queries: int  # query heads times their size
    keys: int  # key heads times their size
    heads: int  # of queries
    vocabulary: int
    gated: bool  # a feed-forward of three matrices
    rms: bool  # norms without a mean, in several kernels; else layer norms, in one
    normed: bool  # norms of queries and keys
    in_steps: bool  # the activation is written as several kernels
    reads: int  # linear layers that read the stream: of attention, and of the feed-forward

    @classmethod
    def of(cls, module: nn.Module) -> Decoder | None:
        """From a transformers model's config and the names of its layers; None where it is no dense decoder."""
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "get_text_config"):
            return None
        text = config.get_text_config(decoder=True)
        try:
            hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
            kind, vocabulary = text.model_type, text.vocab_size
        except AttributeError:
            return None
        if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
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
    """How a role computes.

    Attributes:
        param: type of the weights.
        compute: type of the forward pass.
        chunk: rows of logits at one time; 0 of a role without logits.
        recompute: logits are computed again in the backward pass.
        wide_chunk: tokens that a feed-forward runs at a time; 0: all.
        compiled: layers and log-probs are compiled.
        kernel: attention by a kernel for packed sequences, keys and values as many as queries; else by rectangles.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    chunk: int = 1024
    recompute: bool = True
    wide_chunk: int = 0
    compiled: bool = False
    kernel: bool = False


@dataclass(frozen=True)
class Activations:
    """Bytes that tokens of a micro-batch need; see the module.

    Attributes:
        layer: of one layer and token, kept.
        carried: of one layer and token with checkpointing, kept.
        layers: number of layers.
        ends: of a token, before the first and behind the last layer.
        chunks: whatever the number of tokens: a chunk of logits, of feed-forwards.
        copies: weights of the layers in the type of the forward pass, where autocast makes them.
        passing: of a token without gradient: what exists at one time.
    """

    layer: int
    carried: int
    layers: int
    ends: int
    chunks: int
    copies: int
    passing: int

    def token(self, recomputed: float) -> int:
        """Of one token in training.

        Args:
            recomputed: share of the layers that keep their input alone.
        """
        layers = self.layers * (recomputed * self.carried + (1 - recomputed) * self.layer)
        return int(layers) + (self.layer if recomputed else 0) + self.ends

    def fitting(self, free: int, recomputed: float, trained: bool = True) -> int:
        """Tokens of a micro-batch that fit into ``free`` bytes; 0 where none do."""
        each = self.token(recomputed) if trained else self.passing
        return max(0, int((free * (1 - RESERVE) - self.chunks - self.copies) // each))


def activations(shape: Decoder, how: Settings) -> Activations:
    """What the tokens of a micro-batch need. The formulas are those of the module."""
    e, s = how.compute.itemsize, max(how.compute.itemsize, how.param.itemsize)
    cast = how.param.itemsize > how.compute.itemsize
    stream = _stream(shape, how, e, s, cast)
    normed = shape.normed * (shape.queries + shape.keys)
    normed *= e if how.compiled else (2 * e if e >= 4 else 4 + e)
    attention = 4 * e * shape.queries + 4 * shape.heads
    if not how.kernel:
        attention = e * (3 * shape.queries + 2 * shape.keys) + 4 * shape.heads
    wide = e * shape.wide * _wide(shape, how.compiled)
    kept = 0 if how.wide_chunk else wide
    logits = how.chunk * shape.vocabulary * (e if how.compiled else 12 + e)
    rows = (2 + shape.rms) * s * shape.hidden  # of the last norm, and those that the head reads
    return Activations(
        layer=stream + normed + attention + kept,
        carried=s * shape.hidden,
        layers=shape.layers,
        ends=rows + 24 + (0 if how.recompute or not how.chunk else e * shape.vocabulary),
        chunks=logits + how.wide_chunk * wide,
        copies=cast * e * _matrices(shape),
        passing=4 * s * shape.hidden + attention + kept,
    )


def _stream(shape: Decoder, how: Settings, e: int, s: int, cast: bool) -> int:
    """Norms, and what the linear layers read of them."""
    if how.compiled:
        return 4 * s * shape.hidden
    read = shape.reads if cast else 2  # autocast makes a copy for each layer that reads
    normalised = 0 if not shape.rms else (4 if cast or e >= 4 else e)
    before = 4 if shape.rms else s  # such a norm is computed in float32
    return (2 * (before + normalised) + read * e) * shape.hidden


def _wide(shape: Decoder, compiled: bool) -> int:
    if shape.gated:
        return 3 if compiled else 4
    return 5 if shape.in_steps and not compiled else 2


def _matrices(shape: Decoder) -> int:
    """Weights of the layers' matrices."""
    attention = shape.hidden * (2 * shape.queries + 2 * shape.keys)
    return shape.layers * (attention + (3 if shape.gated else 2) * shape.hidden * shape.wide)


@dataclass(frozen=True)
class Estimate:
    """What a role needs, and what there is.

    Attributes:
        free: bytes that the role may still take, with what it holds itself.
    """

    held: Held
    activations: Activations
    free: int | None = None

    @property
    def left(self) -> int:
        """Bytes for activations."""
        return max(0, (self.free or 0) - self.held.total)

    def checkpointing(self, wanted: int) -> bool:
        """Whether activations should be recomputed: without it ``wanted`` tokens do not fit."""
        return self.activations.fitting(self.left, False) < wanted

    def budget(self, recomputed: float, trained: bool = True) -> int:
        """Tokens of a micro-batch, a multiple of ``ROUND``; ``recomputed`` as for ``token``."""
        tokens = min(self.activations.fitting(self.left, recomputed, trained), MOST)
        return max(ROUND, tokens // ROUND * ROUND)

    def table(self) -> list[tuple[str, str]]:
        """For people: names and sizes."""
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
    """Bytes that can still be allocated on a device; None where it does not tell (the CPU)."""
    told = getattr(torch.get_device_module(device), "mem_get_info", None) if device.type != "cpu" else None
    if told is None:
        return None
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(told(device)[0]) + cached


def _bytes(parameters: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in parameters)


def optimizer_bytes(optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Of the state that lies on a device already, on one rank."""
    values: Sequence[Any] = [] if optimizer is None else [*optimizer.state.values()]
    held = [here(tensor) for state in values for tensor in state.values() if isinstance(tensor, Tensor)]
    return _bytes(tensor for tensor in held if tensor.device.type == device.type)
