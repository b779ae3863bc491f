"""The LoRA adapter of a module: its tensors, the base model, the merged weights, and the switch between them.

``lora.py`` puts peft's layers into the module itself, so a forward pass, a sampler or a wrapper sees the
model class that it knows. Not supported: more than one adapter at a time.
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
from engine_core.contracts.weight_sync import ADAPTER_PREFIX
from engine_core.runs import state_files
from engine_plugin_torch.sharded import axes_that_split, made_whole, whole
from engine_plugin_torch.weights import base_places, identity, places, take_weights, weight_at

NAME = "default"  # peft's name of a single adapter
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FACTORS = ("lora_B", "lora_embedding_A")  # with these at 0 the product is 0, and it can still learn


class Adapter:
    """The adapter that ``lora.attach`` put into a module.

    Args:
        module: the module that contains peft's layers.
        config: peft's ``LoraConfig``, written next to an exported adapter.
        base: identity of the base's weights before they were quantized; None: computed when it is needed.
    """

    def __init__(self, module: nn.Module, config: Any, base: str | None = None) -> None:
        self.module, self.config = module, config  #: constructor argument
        self._base = base  # cached by ``base_identity``
        self._is_off = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapter within the context, which may be nested: a forward pass is that of the base model."""
        if self._is_off:
            yield
            return
        layers = [
            m for m in self.module.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        ]
        trained = {id(p) for p in self.module.parameters() if p.requires_grad}

        def switch(on: bool) -> None:
            """Enable or disable the adapters; ``requires_grad`` stays as it was."""
            for layer in layers:
                layer.enable_adapters(on)
            for parameter in self.module.parameters():  # peft's switch also changes ``requires_grad``
                parameter.requires_grad_(id(parameter) in trained)

        try:
            self._is_off = True
            switch(False)
            yield
        finally:
            self._is_off = False
            switch(True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors (not copies), by their names in an adapter file; ``lora_A: [R, in]``."""
        own = own_weights(self.module)
        return {file_name(name): tensor for name, tensor in own.items() if OF_ADAPTER.search(name)}

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights ``W + scale * B A: [out, in]`` one at a time, under the names of the base model.

        The sum is computed in float32 or wider and rounded to the base's type. The module does not change.
        ``B: [out, R]``, ``A: [R, in]``. Weights without an adapter are yielded as they are.
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
        """Load the weights of an adapter, or of a whole model.

        An adapter's weights (the names begin with ``base_model.model.``) replace those of this adapter. A model's
        weights replace those of the base, and the adapter is reset so that its product is 0: the module then
        computes what the model would. Later checkpoints fit the new base only.

        Args:
            stream: (name, tensor) pairs; each tensor has the shape ``[D0, ...]`` of the weight that it replaces.
            mix: share of the new weights; the old ones keep ``1 - mix``.

        Raises:
            DataError: a name or shape does not fit, or weights are missing.
        """
        items = iter(stream)
        first = list(itertools.islice(items, 1))
        rest = itertools.chain(first, items)
        if first and first[0][0].startswith(ADAPTER_PREFIX):
            take_weights(self.module, rest, mix, self.places())
            return
        self._fold()
        take_weights(self.module, rest, mix, self._base_places())
        self._begin_again()

    def places(self) -> Mapping[str, Any]:
        """Return the destinations for ``take_weights`` of the adapter's tensors, by their names in an adapter file."""
        return self.tensors()

    def _base_places(self) -> Mapping[str, Any]:
        """Return the destinations for ``take_weights`` of the base's tensors, by their names without an adapter."""
        return base_places(self.module)

    def base_identity(self) -> str:
        """Return a hash that identifies the base's weights; for a quantized base, the weights before quantization."""
        if self._base is None:
            self._base = identity(base_weights(self.module))
        return self._base

    def config_file(self) -> bytes:
        """Return the content of ``adapter_config.json``, which lies next to the tensors in an adapter folder."""
        with tempfile.TemporaryDirectory() as name:
            self.config.save_pretrained(name)
            return (Path(name) / CONFIG).read_bytes()

    def export(self, folder: Path, writes: bool = True) -> None:
        """Write a folder that ``PeftModel.from_pretrained`` loads. Collective for a sharded module.

        Args:
            folder: the folder to write; it is created if missing.
            writes: whether this rank writes. All ranks of a sharded module gather, and one of them writes.
        """
        tensors = {name: whole(tensor) for name, tensor in self.tensors().items()}
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state_files.save_tensors(folder / FILE, tensors)
        self.config.save_pretrained(str(folder))

    @torch.no_grad()
    def _fold(self) -> None:
        """Merge the adapter into the base and reset the adapter."""
        take_weights(self.module, self.merged(), own=self._base_places())
        self._begin_again()

    @torch.no_grad()
    def _begin_again(self) -> None:
        """Reset the adapter so that it adds nothing to the present base."""
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
    """Return ``W + scale * B A: [out, in]`` (``B: [out, R]``) in the base's type.

    With DoRA and ``lengths`` each row is scaled to its learned length.
    """
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
    """Return the name in an adapter file of the tensor that the module calls ``name``."""
    plain = OF_ADAPTER.sub(lambda found: "" if found[1] == "modules_to_save" else f".{found[1]}", name)
    return ADAPTER_PREFIX + plain.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
