"""A module's weights under its own names and under those that ``save_pretrained`` writes.

The names differ for few models: transformers holds the experts of a mixture in one tensor and writes
one tensor per expert, as other programs expect. A module with a LoRA adapter has its base's weights in
peft's layers; this module separates their names, and ``adapter.py`` computes with them. A quantized layer
holds pieces, but publishes and takes its whole weight. Weights have any shape ``[D0, ...]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.contracts.weight_names import (
    OF_ADAPTER,
    base_name,
    converts,
    own_weights,
    published,
    some_values,
)
from engine_core.contracts.weight_sync import ADAPTER_PREFIX
from engine_core.errors import DataError, near
from engine_plugin_torch.quantized_linear import QuantizedLinear
from engine_plugin_torch.sharded import whole, write

SAMPLES = 256  # values of each tensor in an identity


def places(module: nn.Module) -> dict[str, Tensor | QuantizedLinear]:
    """Return ``own_weights``: tensors ``[D0, ...]``, but each quantized layer itself by the name of its weight."""
    layers = {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}
    if not layers:
        return {**own_weights(module)}
    found: dict[str, Tensor | QuantizedLinear] = {}
    for name, tensor in own_weights(module).items():
        owner, _, leaf = name.rpartition(".")
        if owner in layers and leaf != "bias":
            found[f"{owner}.weight"] = layers[owner]
        else:
            found[name] = tensor
    return found


def base_places(module: nn.Module) -> dict[str, Tensor | QuantizedLinear]:
    """Return ``places`` of the model below a LoRA adapter (``[D0, ...]``), by their names without the adapter."""
    return {base_name(name): place for name, place in places(module).items() if not OF_ADAPTER.search(name)}


def weight_at(place: Tensor | QuantizedLinear) -> Tensor:
    """Return the weight ``[D0, ...]`` at a place, dequantized if needed."""
    return place if isinstance(place, Tensor) else place.weight


def published_weights(
    module: Any, own: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights ``[D0, ...]`` under the names of ``save_pretrained``; see ``weight_names.published``.

    Args:
        module: the model; quantized layers yield dequantized weights.
        own: tensors to publish instead of the module's, by its names and in its order; read lazily.
    """
    own = ((name, weight_at(place)) for name, place in places(module).items()) if own is None else own
    yield from published(module, own)


@torch.no_grad()
def take_weights(
    module: nn.Module,
    stream: Iterable[tuple[str, Tensor]],
    mix: float = 1.0,
    own: Mapping[str, Any] | None = None,
) -> None:
    """Write ``w <- (1 - mix) * w + mix * new`` for weights under the module's own names.

    Args:
        module: the model.
        stream: names and whole tensors ``[D0, ...]``, in any order.
        mix: share of the new weights.
        own: the required weights by name: tensors, or objects with ``shape`` and a method ``store(new, mix)``;
            default: all weights of the module, quantized layers as whole weights.

    Raises:
        DataError: a name or shape does not fit, or weights are missing. Earlier weights have been written.
    """
    own = places(module) if own is None else own
    left = set(own)
    for name, new in stream:
        if name not in own:
            raise DataError(f"Unknown weight '{name}' for {type(module).__name__}." + near(name, own))
        place = own[name]
        if place.shape != new.shape:
            raise DataError(f"Weight '{name}' has shape {list(new.shape)}; expected {list(place.shape)}.")
        if isinstance(place, Tensor):
            write(place, new, mix)
        else:
            place.store(new, mix)
        left.discard(name)
    if left:
        some = ", ".join(sorted(left)[:5])
        raise DataError(
            f"{len(left)} of {len(own)} weights did not come: {some}. Those that came were taken."
        )


def to_own_names(module: Any, stream: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Return the weights ``[D0, ...]`` under the module's own names, the inverse of ``published_weights``.

    A model whose names differ needs all weights in memory for it. The tensors of an adapter keep their names.
    """
    if not converts(module):
        return stream
    weights = dict(stream)
    if all(name.startswith(ADAPTER_PREFIX) for name in weights):
        return weights.items()
    model, info = type(module).from_pretrained(
        None, config=module.config, state_dict=weights, dtype=module.dtype, output_loading_info=True
    )
    _refuse(type(module).__name__, info)
    return own_weights(model).items()


def _refuse(name: str, info: Mapping[str, Any]) -> None:
    if info["missing_keys"] or info["unexpected_keys"]:
        missing, unknown = (", ".join(sorted(info[key])[:5]) for key in ("missing_keys", "unexpected_keys"))
        raise DataError(
            f"Weights do not fit {name}: missing {missing or 'none'}; unknown {unknown or 'none'}."
        )


def identity(tensors: Mapping[str, Tensor], whole_of: Callable[[Tensor], Tensor] = whole) -> str:
    """Return a hash that identifies weights ``[D0, ...]`` by names, shapes and some values of each tensor.

    Values are rounded to bfloat16 first, so the hash is the same for every type and device. ``whole_of`` gathers a
    tensor.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = whole_of(tensors[name])
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(
            some_values(tensor, SAMPLES).to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()
        )
    return digest.hexdigest()
