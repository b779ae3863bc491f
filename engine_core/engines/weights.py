"""A module's weights: under its own names, and under those that ``save_pretrained`` writes.

The two differ for few models: transformers holds the experts of a mixture in one tensor and writes
one for each expert, as other programs expect them. A module with a LoRA adapter has its base's
weights in layers of peft; their names are told apart here, what they mean is in ``adapter.py``. A quantised
layer holds pieces; what is published, and what is taken, is its whole weight.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from engine_core.engines.quantized import QuantizedLinear
from engine_core.engines.sharded import whole, write
from engine_core.errors import DataError, nearest

LAYER = re.compile(r"^(.*?\.\d+)\.")
OF_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save)\.default(?=\.|$)")  # as peft names what is trained
SAMPLES = 256  # values of each tensor in an identity
IN_CHECKSUM = 64  # and in a checksum, beside a sum
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value
BASE, SAVED = ".base_layer.", ".original_module."  # and what lies below it


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """The module's own tensors (not copies) by its own names, tied ones once."""
    return {name: tensor.detach() for name, tensor in own_parameters(module).items()}


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """``own_weights`` as the module has them: parameters, and buffers that are saved."""
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    seen: set[int] = set()
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in tied or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        found[name] = tensor
    return found


def base_weights(module: nn.Module) -> dict[str, Tensor]:
    """``own_weights`` of the model below a LoRA adapter, by the names that they have without it."""
    own = own_weights(module)
    return {base_name(name): tensor for name, tensor in own.items() if not OF_ADAPTER.search(name)}


def places(module: nn.Module) -> dict[str, Tensor | QuantizedLinear]:
    """``own_weights`` with each quantised layer in the place of its pieces, by the name of its weight."""
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
    """``places`` of the model below a LoRA adapter, by the names that they have without it."""
    return {base_name(name): place for name, place in places(module).items() if not OF_ADAPTER.search(name)}


def weight_at(place: Tensor | QuantizedLinear) -> Tensor:
    """The weight there; of a quantised layer made anew."""
    return place if isinstance(place, Tensor) else place.weight


def base_name(name: str) -> str:
    """The name that a weight of the base has without an adapter over it."""
    return name.replace(BASE, ".").replace(SAVED, ".")


def published_weights(
    module: Any, own: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of ``save_pretrained``, converted a layer at a time.

    Args:
        module: the model.
        own: other tensors than its own, by the module's names and in their order; taken as they are needed.
    """
    own = ((name, weight_at(place)) for name, place in places(module).items()) if own is None else own
    if not converts(module):
        yield from own
        return
    for _, layer in itertools.groupby(own, key=lambda item: _layer(item[0])):
        yield from revert_weight_conversion(module, dict(layer)).items()


def converts(module: nn.Module) -> bool:
    """Whether ``save_pretrained`` writes other names or shapes than the module's own."""
    if not isinstance(module, PreTrainedModel):
        return False
    shapes = {name: tensor.to("meta") for name, tensor in base_weights(module).items()}
    return revert_weight_conversion(module, shapes).keys() != shapes.keys()


@torch.no_grad()
def take_weights(
    module: nn.Module,
    stream: Iterable[tuple[str, Tensor]],
    mix: float = 1.0,
    own: Mapping[str, Any] | None = None,
) -> None:
    """``w <- (1 - mix) * w + mix * new`` for weights under the module's own names.

    Args:
        module: the model.
        stream: names and tensors, in any order.
        mix: share of the new.
        own: the weights that must come, by name: tensors, or what has their ``shape`` and a method ``store(new, mix)``;
            default: all of the module's, quantised ones whole.

    Raises:
        DataError: a name or shape does not fit, or weights are missing. Those before it were taken.
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
    """The inverse of ``published_weights``; a model that converts is gathered whole to do it."""
    if not converts(module):
        return stream
    weights = dict(stream)
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


def _layer(name: str) -> str:
    match = LAYER.match(name)
    return match[1] if match else name


def near(name: str, known: Iterable[str]) -> str:
    """The nearest name, without the whole list: models have hundreds."""
    match = nearest(name, known)
    return f" Did you mean '{match}'?" if match else ""


def identity(tensors: Mapping[str, Tensor]) -> str:
    """A hash by which weights are known again: names, shapes and some values of each tensor.

    Values are rounded to bfloat16 first, so that it is the same in every type and on every device.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = whole(tensors[name])
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(_some(tensor, SAMPLES).to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


class Checksum:
    """Of names, shapes, and values where they lie: a sum over each tensor and some of its values; all bytes of one of integers.

    A hash of every byte would bring all weights to the host, which takes a hundred times as long as the
    update itself. Two orders of the same values within one tensor are told apart by the samples alone.

    On a CPU the sum is of the values' bits, as whole numbers: it does not depend on how many threads share the work, so
    that unlike hosts agree. On an accelerator it is the L1 norm, one kernel for many tensors.
    """

    def __init__(self) -> None:
        self._words = hashlib.blake2b(digest_size=16)
        self._values: list[Tensor] = []

    def of(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass weights on, each once it was added."""
        for entry in stream:
            self.add([entry])
            yield entry

    def add(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Tensors of one device."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for name, tensor in bucket:
            self._words.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
            if tensor.is_floating_point():
                by_type.setdefault(tensor.dtype, []).append(tensor.detach())
            else:  # a config, a table: small
                self._words.update(_bits(tensor.cpu(), torch.uint8).numpy().tobytes())
        for dtype, tensors in by_type.items():
            if tensors[0].is_cpu:
                whole = WHOLE[dtype.itemsize]
                sums = [int(_bits(tensor, whole).sum(dtype=torch.int64)) for tensor in tensors]
                self._words.update(str(sums).encode())
            else:
                self._values.append(_norms(tensors))
            self._values.append(torch.cat([_some(tensor, IN_CHECKSUM) for tensor in tensors]).float())

    def result(self) -> str:
        """Hexadecimal; the device is waited for once, here."""
        if self._values:
            values = torch.cat([v.to(self._values[0].device) for v in self._values]).cpu()
            self._words.update(values.numpy().tobytes())
        return self._words.hexdigest()


def _norms(tensors: list[Tensor]) -> Tensor:
    """[len(tensors)] float32: the L1 norm of each; of one type, which a norm may not be narrower than."""
    wide = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 1, dtype=wide)).float()


def _bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[n] of whole numbers: what lies in it."""
    return tensor.detach().contiguous().reshape(-1).view(dtype)


def _some(tensor: Tensor, count: int) -> Tensor:
    """[at most ``count``] of its values, evenly spread."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // count)][:count]
