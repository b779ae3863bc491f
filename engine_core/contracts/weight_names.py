"""Names of a model's weights: the module's own, and those that ``save_pretrained`` writes.

The two differ for few models: transformers holds the experts of a mixture in one tensor and writes one tensor for each
expert, as other programs expect them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from engine_core.errors import nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYER = re.compile(r"^(.*?\.\d+)\.")
OF_ADAPTER = re.compile(r"\.(lora_\w+|modules_to_save)\.default(?=\.|$)")  # as peft names what is trained
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


def base_name(name: str) -> str:
    """The name that a weight of the base has without an adapter over it."""
    return name.replace(BASE, ".").replace(SAVED, ".")


def published(module: Any, own: Iterable[tuple[str, Tensor]] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names of ``save_pretrained``, converted a layer at a time.

    Args:
        module: the model.
        own: its tensors by its own names, in their order; default: those that it has.
    """
    own = own_weights(module).items() if own is None else own
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


def _layer(name: str) -> str:
    match = LAYER.match(name)
    return match[1] if match else name


def near(name: str, known: Iterable[str]) -> str:
    """The nearest name, without the whole list: models have hundreds."""
    match = nearest(name, known)
    return f" Did you mean '{match}'?" if match else ""


def some_values(tensor: Tensor, count: int) -> Tensor:
    """[at most ``count``] of its values, evenly spread."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // count)][:count]
