"""The quantization of a model's layers, one at a time.

The unquantized model is never on the device as a whole: it is built on the CPU, and each linear layer is moved to the
device when it is quantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from engine_core.errors import ConfigError
from engine_plugin_torch.options import quantize_problem
from engine_plugin_torch.quantized_linear import FOUR_BITS, QuantizedLinear

MIB = 1024**2
DEVICES = {
    "int8": ("cpu", "cuda", "mps", "xpu"),
    "fp8": ("cpu", "cuda", "xpu"),
    "4 bits": ("cpu", "cuda", "xpu"),
}
"""Method -> types of device that have what it needs."""


@dataclass(frozen=True)
class Change:
    """The effect of quantization on memory.

    Attributes:
        layers: number of quantized layers.
        bytes_before: bytes of all weights before.
        bytes_after: bytes of all weights after.
    """

    layers: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return f"{self.layers} layers, weights {self.bytes_before / MIB:.1f} -> {self.bytes_after / MIB:.1f} MiB."


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
    if problem := quantize_problem(method, table, frozen):
        raise ConfigError(problem)
    if method and device.type not in (devices := DEVICES["4 bits" if method in FOUR_BITS else method]):
        raise ConfigError(
            f"{table}.quantize: '{method}' does not run on {device}; it runs on {', '.join(devices)}. Leave the key out."
        )


def quantize(
    module: nn.Module,
    method: str,
    device: torch.device,
    table: str,
    keep: Collection[str] = (),
) -> Change:
    """Quantize the linear layers of a model on the CPU, move the model to a device, and return the change.

    Args:
        module: the model on the CPU in its final type; changed in place.
        method: ``int8``, ``fp8``, ``nf4`` or ``fp4``.
        device: the target device.
        table: name of the options' table, for messages: ``ref.torch``.
        keep: name endings of modules that are not quantized, in addition to the output head.

    Raises:
        ConfigError: no layer can be quantized. The module is unchanged.
    """
    layers = linear_layers(module, keep)
    if not layers:
        raise ConfigError(
            f"{table}.quantize: {type(module).__name__} has no linear layer besides its head that could be kept in "
            f"'{method}'. Leave the key out."
        )
    count, before = len(layers), num_bytes(module)
    for part in module.modules():
        if part not in layers.values():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
    while layers:  # each layer is removed from the dict, so that its unquantized weight is freed
        name, layer = layers.popitem()
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, QuantizedLinear(layer.to(device), method))
    return Change(count, before, num_bytes(module))


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
