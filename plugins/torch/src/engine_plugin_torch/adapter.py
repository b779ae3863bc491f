"""The LoRA adapter of a module: its tensors, the model below it, the two merged, and the switch between them.

peft's layers lie in the module itself (``lora.py`` puts them there), so that a forward, a sampler or a
wrapper sees the model that it knows. Left out: more than one adapter at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from engine_core.contracts.weight_names import BASE, OF_ADAPTER, SAVED, base_name, base_weights, own_weights
from engine_core.runs import state_files
from engine_plugin_torch.sharded import axes_that_split, made_whole, whole
from engine_plugin_torch.weights import base_places, identity, places, take_weights, weight_at

NAME = "default"  # what peft calls an only adapter
PREFIX = "base_model.model."  # of every name in an adapter file
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FACTORS = ("lora_B", "lora_embedding_A")  # with these at 0 the product is 0, and learning goes on


class Adapter:
    """What ``lora.attach`` put into a module.

    Args:
        module: with layers of peft.
        config: peft's ``LoraConfig``, written beside an exported adapter.
        base: identity of the base's weights, where they were others when they were loaded (quantised since).
    """

    def __init__(self, module: nn.Module, config: Any, base: str | None = None) -> None:
        self.module, self.config = module, config
        self._base = base  # once asked for

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """The module is the base model: nothing of the adapter is in a forward pass."""
        layers = [
            m for m in self.module.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
        trained = {id(p) for p in self.module.parameters() if p.requires_grad}

        def switch(on: bool) -> None:
            for layer in layers:
                layer.enable_adapters(on)
            for parameter in self.module.parameters():  # the switch of peft also sets what is trained
                parameter.requires_grad_(id(parameter) in trained)

        try:
            switch(False)
            yield
        finally:
            switch(True)

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's own tensors (not copies), by the names of an adapter file."""
        own = own_weights(self.module)
        return {file_name(name): tensor for name, tensor in own.items() if OF_ADAPTER.search(name)}

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Base and adapter as one model, by the names of the base: ``W + scale * B A``, one tensor at a time.

        The sum is taken in float32 at least and rounded to the base's type. The module is left alone.
        """
        own = places(self.module)
        for name, place in own.items():
            owner, _, leaf = name.rpartition(BASE)
            if OF_ADAPTER.search(name):
                continue
            if leaf == "weight" and owner:
                yield base_name(name), merged_weight(self.module.get_submodule(owner))
            elif SAVED in name:
                learned = weight_at(own[name.replace(SAVED, f".modules_to_save.{NAME}.")])
                yield base_name(name), learned.to(weight_at(place).dtype)
            else:
                yield base_name(name), weight_at(place)

    def take(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Weights of an adapter, or of a whole model.

        Those of an adapter (their names begin with ``base_model.model.``) become its own. Those of a model
        become the base's, and the product of the adapter is 0 from then on: the module computes what the
        model would. Its checkpoints then fit this base only.

        Raises:
            DataError: a name or shape does not fit, or weights are missing.
        """
        items = iter(stream)
        first = list(itertools.islice(items, 1))
        rest = itertools.chain(first, items)
        if first and first[0][0].startswith(PREFIX):
            take_weights(self.module, rest, mix, self.places())
            return
        self._fold()
        take_weights(self.module, rest, mix, self._base_places())
        self._begin_again()

    def places(self) -> Mapping[str, Any]:
        """Where ``take_weights`` puts the adapter's own, by the names of an adapter file."""
        return self.tensors()

    def _base_places(self) -> Mapping[str, Any]:
        """Where it puts the base's, by the names that these have without the adapter."""
        return base_places(self.module)

    def base_identity(self) -> str:
        """A hash by which the base's weights are known again; of a quantised base as they were before."""
        if self._base is None:
            self._base = identity(base_weights(self.module))
        return self._base

    def config_file(self) -> bytes:
        """What stands beside the tensors in an adapter folder."""
        with tempfile.TemporaryDirectory() as name:
            self.config.save_pretrained(name)
            return (Path(name) / CONFIG).read_bytes()

    def export(self, folder: Path, writes: bool = True) -> None:
        """A folder that ``PeftModel.from_pretrained`` loads.

        Args:
            folder: where.
            writes: False on all ranks but one of a sharded module, which all gather together.
        """
        tensors = {name: whole(tensor) for name, tensor in self.tensors().items()}
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state_files.save_tensors(folder / FILE, tensors)
        self.config.save_pretrained(str(folder))

    @torch.no_grad()
    def _fold(self) -> None:
        """Bring what was learned into the base."""
        take_weights(self.module, self.merged(), own=self._base_places())
        self._begin_again()

    @torch.no_grad()
    def _begin_again(self) -> None:
        """An adapter that adds nothing to the base as it is now."""
        self._base = None
        for name, tensor in self.tensors().items():
            if any(f".{factor}" in name for factor in FACTORS):
                tensor.zero_()
        for module in self.module.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.modules_to_save[NAME].load_state_dict(module.original_module.state_dict())
            elif isinstance(module, LoraLayer) and NAME in module.lora_magnitude_vector:
                magnitude: Any = module.lora_magnitude_vector[NAME].weight
                magnitude.copy_(merged_weight(module, lengths=False).norm(dim=1))


@torch.no_grad()
def merged_weight(layer: Any, lengths: bool = True) -> Tensor:
    """``W + scale * B A``; of DoRA (with ``lengths``) its rows scaled to the lengths that were learned."""
    base = layer.get_base_layer().weight
    if axes_that_split(base) > 1:
        with made_whole(layer):
            return merged_weight(layer, lengths)
    exact = torch.promote_types(base.dtype, torch.float32)
    weight = base.to(exact) + layer.get_delta_weight(NAME).to(exact)
    if lengths and NAME in layer.lora_magnitude_vector:
        length = layer.lora_magnitude_vector[NAME].weight.to(exact)
        weight = weight * (length / weight.norm(dim=1))[:, None]
    return weight.to(base.dtype)


def file_name(name: str) -> str:
    """A tensor's name in an adapter file, from its name in the module."""
    plain = OF_ADAPTER.sub(lambda found: "" if found[1] == "modules_to_save" else f".{found[1]}", name)
    return PREFIX + plain.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
