"""Puts quantised layers into a model, one at a time, and measures what they change.

The whole model is never on the device: it is built on the CPU, and each linear layer comes to the device
to be quantised (and, for the measurement, to be computed with).
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
    """What quantising did.

    Attributes:
        layers: that were quantised.
        bytes_before: of all weights.
        bytes_after: of all weights.
        tokens: of the probe.
        of: what was compared: ``log-prob`` of the probe's next tokens, or ``score``.
        mean: of the absolute differences.
        max: of the absolute differences.
        mean_kl: of the whole model's distribution from the quantised one's, over the probe's positions; nats.
        max_kl: the same; None of scores.
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
    """Refuse, before anything is allocated, what cannot be quantised.

    Args:
        method: of the backend's table.
        device: that the role runs on.
        table: where the options stand, for messages: ``actor.torch``.
        frozen: the weights are not trained: no role's, or those below an adapter.

    Raises:
        ConfigError: the weights are trained, the library is missing, or it knows no such device.
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
    """Replace the linear layers of a model on the CPU, bring it to a device, and say what changed.

    Args:
        module: in its final type; changed in place.
        method: ``int8``, ``fp8``, ``nf4`` or ``fp4``.
        device: that it comes to.
        precision: of the role.
        table: where the options stand, for messages: ``ref.torch``.
        keep: ends of names of modules that stay whole, besides the output head.
        tokenizer: of the probe text; without one the probe is random tokens.

    Raises:
        ConfigError: no layer can be quantised. The module was left alone.
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
    while layers:  # taken out of the list, so that the whole weight is freed
        name, layer = layers.popitem()
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, QuantizedLinear(layer.to(device), method))
    found = _outputs(module, ids, precision)
    return _change(expected, found, ids, count, before, num_bytes(module))


def num_bytes(module: nn.Module) -> int:
    """Of all parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def linear_layers(module: nn.Module, keep: Collection[str]) -> dict[str, nn.Linear]:
    """The layers to quantise: plain linear ones, but for heads, shared weights and what is trained whole."""
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
    """[T] token ids that the model knows."""
    embeddings = getattr(module, "get_input_embeddings", lambda: None)()
    vocabulary = embeddings.weight.shape[0] if embeddings is not None else 2
    if tokenizer is not None:
        ids = torch.tensor(tokenizer.encode(PROBE)[:PROBE_TOKENS])
        if len(ids) > 1 and int(ids.max()) < vocabulary:
            return ids
    return torch.randint(vocabulary, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _outputs(module: nn.Module, ids: Tensor, precision: Precision) -> Tensor:
    """[T, V] logits, or [T, 1] scores; float32 on the CPU."""
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
    """Bring a module's own tensors to a device, not its children's."""
    for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
        tensor.data = tensor.data.to(device)


@contextlib.contextmanager
def _one_at_a_time(layers: Collection[nn.Linear], device: torch.device) -> Iterator[None]:
    """Each layer is on the device only while it computes."""
    hooks = []

    def fetch(layer: nn.Module, _: object) -> None:
        layer.to(device)

    def put_back(layer: nn.Module, *_: object) -> None:
        layer.to("cpu")

    for layer in layers:
        hooks += [layer.register_forward_pre_hook(fetch), layer.register_forward_hook(put_back)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
