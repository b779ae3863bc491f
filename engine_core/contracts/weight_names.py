"""Names of a model's weights: the module's own names, and those that ``save_pretrained`` writes.

The two differ for few models: transformers holds the experts of a mixture in one tensor and writes one tensor per
expert, as other programs expect.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYER = re.compile(r"^(.*?\.\d+)\.")
OF_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save)\.default(?=\.|$)")  # peft's names of trained weights
BASE, SAVED = ".base_layer.", ".original_module."  # peft's names of the base weights below an adapter


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's tensors ``[D1, ..., Dn]`` by its own names, detached but not copied, tied ones once."""
    return {name: tensor.detach() for name, tensor in own_parameters(module).items()}


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers ``[D1, ..., Dn]`` by the module's own names, tied ones once."""
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
    """Return the base model's weights ``[D1, ..., Dn]`` below a LoRA adapter, by their names without the adapter."""
    own = own_weights(module)
    return {base_name(name): tensor for name, tensor in own.items() if not OF_ADAPTER.search(name)}


def base_name(name: str) -> str:
    """Return the name that a base weight has without an adapter."""
    return name.replace(BASE, ".").replace(SAVED, ".")


def published(module: Any, own: Iterable[tuple[str, Tensor]] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names of ``save_pretrained``, converted one layer at a time.

    Args:
        module: the model.
        own: tensors ``[D1, ..., Dn]`` under the module's own names, in its order; default: the module's own.
    """
    own = own_weights(module).items() if own is None else own
    if not converts(module):
        yield from own
        return
    for _, layer in itertools.groupby(own, key=lambda item: _layer(item[0])):
        yield from revert_weight_conversion(module, dict(layer)).items()


def converts(module: nn.Module) -> bool:
    """Return whether ``save_pretrained`` writes other names than the module's own."""
    if not isinstance(module, PreTrainedModel):
        return False
    shapes = {name: tensor.to("meta") for name, tensor in base_weights(module).items()}
    return revert_weight_conversion(module, shapes).keys() != shapes.keys()


def _layer(name: str) -> str:
    match = LAYER.match(name)
    return match[1] if match else name


def some_values(tensor: Tensor, count: int) -> Tensor:
    """Return at most ``count`` values of the tensor, evenly spread: [N] with N <= ``count``."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // count)][:count]
