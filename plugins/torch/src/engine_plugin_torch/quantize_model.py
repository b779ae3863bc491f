"""The quantization of a model's layers, one at a time, with a measurement of the change in its outputs.

The unquantized model is never on the device as a whole: it is built on the CPU, and each linear layer is moved to the
device when it is quantized (and, for the measurement, while it computes).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.config.completeness import quantize_problem
from engine_core.errors import ConfigError
from engine_plugin_torch.quantized_linear import FOUR_BITS, QuantizedLinear

if TYPE_CHECKING:
    from engine_plugin_torch.precision import Precision

PROBE = """A baker makes 36 rolls in the morning and sells all but 5 of them. In the afternoon she makes half as many \
again. How many rolls has she made, and how many are left of the morning's? She has made 36 + 18 = 54 rolls; 5 are left.
def mean(values: list[float]) -> float:
    return sum(values) / len(values)
"""
PROBE_TOKENS = 128
MIB = 1024**2
DEVICES = {
    "int8": ("cpu", "cuda", "mps", "xpu"),
    "fp8": ("cpu", "cuda", "xpu"),
    "4 bits": ("cpu", "cuda", "xpu"),
}
"""Method -> types of device that have what it needs."""


@dataclass(frozen=True)
class Change:
    """The effect of quantization, measured on the tokens of a probe.

    Attributes:
        layers: number of quantized layers.
        bytes_before: bytes of all weights before.
        bytes_after: bytes of all weights after.
        tokens: number of tokens of the probe.
        of: the compared output: ``log-prob`` of the probe's next tokens, or ``score``.
        mean: mean absolute difference.
        max: largest absolute difference.
        mean_kl: mean of KL(unquantized || quantized) over the probe's positions in nats; None for scores.
        max_kl: largest of these KL values; None for scores.
    """

    layers: int
    bytes_before: int
    bytes_after: int
    tokens: int
    of: str
    mean: float
    max: float
    mean_kl: float | None = None
    max_kl: float | None = None

    def __str__(self) -> str:
        kl = "" if self.mean_kl is None else f"; KL mean {self.mean_kl:.2g}, max {self.max_kl:.2g}"
        return (
            f"{self.layers} layers, weights {self.bytes_before / MIB:.1f} -> {self.bytes_after / MIB:.1f} MiB. On "
            f"{self.tokens} tokens: |change of {self.of}| mean {self.mean:.2g}, max {self.max:.2g}{kl}."
        )


def check_quantized(method: str | None, device: torch.device, table: str, frozen: bool) -> None:
    """Refuse a quantization that cannot work, before anything is allocated.

    Args:
        method: `quantize` of the backend's table.
        device: the device that the role runs on.
        table: name of the options' table, for messages: ``actor.torch``.
        frozen: the weights are not trained: the role is not trained, or they are below an adapter.

    Raises:
        ConfigError: the weights are trained, the library is missing, or the method does not support the device.
    """
    if method is None:
        return
    if problem := quantize_problem(method, table, frozen):
        raise ConfigError(problem)
    if device.type not in (devices := DEVICES["4 bits" if method in FOUR_BITS else method]):
        raise ConfigError(
            f"{table}.quantize: '{method}' does not run on {device}; it runs on {', '.join(devices)}. Leave the key out."
        )


def quantize(
    module: nn.Module,
    method: str,
    device: torch.device,
    precision: Precision,
    table: str,
    keep: Collection[str] = (),
    tokenizer: Any = None,
) -> Change:
    """Quantize the linear layers of a model on the CPU, move the model to a device, and return the change.

    Args:
        module: the model on the CPU in its final type; changed in place.
        method: ``int8``, ``fp8``, ``nf4`` or ``fp4``.
        device: the target device.
        precision: the role's types.
        table: name of the options' table, for messages: ``ref.torch``.
        keep: name endings of modules that are not quantized, in addition to the output head.
        tokenizer: tokenizer for the probe text; without it the probe consists of random tokens.

    Raises:
        ConfigError: no layer can be quantized. The module is unchanged.
    """
    layers = linear_layers(module, keep)
    if not layers:
        raise ConfigError(
            f"{table}.quantize: {type(module).__name__} has no linear layer besides its head that could be kept in "
            f"'{method}'. Leave the key out."
        )
    before = num_bytes(module)
    ids = probe(module, tokenizer).to(device)
    for part in module.modules():
        if part not in layers.values():
            _move_own(part, device)
    with _one_at_a_time(layers.values(), device):
        expected = _outputs(module, ids, precision)
    count = len(layers)
    while layers:  # each layer is removed from the dict, so that its unquantized weight is freed
        name, layer = layers.popitem()
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, QuantizedLinear(layer.to(device), method))
    found = _outputs(module, ids, precision)
    return _change(expected, found, ids, count, before, num_bytes(module))


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; shared tensors count once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def linear_layers(module: nn.Module, keep: Collection[str]) -> dict[str, nn.Linear]:
    """Return the layers to quantize: plain linear layers, except the head, shared weights and modules in ``keep``."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return {
        name: part
        for name, part in module.named_modules()
        if type(part) is nn.Linear
        and part is not head
        and uses[id(part.weight)] == 1
        and not any(f".{end}." in f".{name}." for end in keep)
    }


def probe(module: nn.Module, tokenizer: Any) -> Tensor:
    """Return token ids [T] of the probe, which are within the model's vocabulary."""
    embeddings = getattr(module, "get_input_embeddings", lambda: None)()
    vocabulary = embeddings.weight.shape[0] if embeddings is not None else 2
    if tokenizer is not None:
        ids = torch.tensor(tokenizer.encode(PROBE)[:PROBE_TOKENS])
        if len(ids) > 1 and int(ids.max()) < vocabulary:
            return ids
    return torch.randint(vocabulary, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _outputs(module: nn.Module, ids: Tensor, precision: Precision) -> Tensor:
    """Compute logits [T, V], or scores [T, 1]; float32 on the CPU."""
    positions = torch.arange(len(ids), device=ids.device)[None]
    mixed = precision.param != precision.compute
    with torch.autocast(ids.device.type, precision.compute, enabled=mixed):
        out = module(input_ids=ids[None], position_ids=positions)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits.reshape(-1, logits.shape[-1]).float().cpu()


def _change(expected: Tensor, found: Tensor, ids: Tensor, layers: int, before: int, after: int) -> Change:
    sizes = layers, before, after, len(ids)
    if expected.shape[-1] == 1:
        gap = (found - expected).abs()
        return Change(*sizes, "score", gap.mean().item(), gap.max().item())
    whole, few = expected.log_softmax(-1), found.log_softmax(-1)
    target = ids[1:, None].cpu()
    gap = (few[:-1].gather(1, target) - whole[:-1].gather(1, target)).abs()
    kl = (whole.exp() * (whole - few)).sum(-1)
    return Change(*sizes, "log-prob", gap.mean().item(), gap.max().item(), kl.mean().item(), kl.max().item())


def _move_own(part: nn.Module, device: torch.device) -> None:
    """Move a module's own tensors to a device, without those of its children."""
    for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
        tensor.data = tensor.data.to(device)


@contextlib.contextmanager
def _one_at_a_time(layers: Collection[nn.Linear], device: torch.device) -> Iterator[None]:
    """Keep each layer on the device only while it computes, within the context."""
    hooks = []

    def fetch(layer: nn.Module, _: object) -> None:
        """Move a layer to the device before it computes."""
        layer.to(device)

    def put_back(layer: nn.Module, *_: object) -> None:
        """Move a layer back to the CPU."""
        layer.to("cpu")

    for layer in layers:
        hooks += [layer.register_forward_pre_hook(fetch), layer.register_forward_hook(put_back)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
