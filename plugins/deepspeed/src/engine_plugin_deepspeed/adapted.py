"""A LoRA adapter under ZeRO: the adapter and its base model are partitioned and gathered one layer at a time.

Everything here is collective. Only the adapter is trained, so ZeRO's optimizer holds nothing else. At stage 3 the
frozen weights are partitioned too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_core.contracts.weight_names import BASE, OF_ADAPTER, SAVED, base_name
from engine_plugin_deepspeed.partitions import gathered
from engine_plugin_torch.adapter import FACTORS, NAME, Adapter, file_name, merged_weight
from engine_plugin_torch.weights import identity

if TYPE_CHECKING:
    from engine_plugin_deepspeed.partitions import Partitions, Place

TRAINED_WHOLE, LENGTHS = f".modules_to_save.{NAME}.", ".lora_magnitude_vector."


class AdapterInParts(Adapter):
    """An ``Adapter`` over ``Partitions``.

    Args:
        adapter: the result of ``lora.attach``; its base's identity was computed while the model was whole.
        partitions: those of the same module.
        limit: bytes of tensors gathered at one time.
    """

    def __init__(self, adapter: Adapter, partitions: Partitions, limit: int) -> None:
        super().__init__(adapter.module, adapter.config, adapter.base_identity())
        self.partitions, self.limit = partitions, limit

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's whole tensors (factors: ``[R, IN]`` and ``[OUT, R]``) in float32, on every rank."""
        names = [name for name in self.partitions.own if OF_ADAPTER.search(name)]
        return {file_name(name): tensor for name, tensor in self.partitions.exact_weights(self.limit, names)}

    def places(self) -> dict[str, Place]:
        """Return the places of the adapter's tensors, by the names of an adapter file."""
        own = self.partitions.places()
        return {file_name(name): place for name, place in own.items() if OF_ADAPTER.search(name)}

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights (``[OUT, IN]``) in their compute type; one layer is gathered at a time."""
        for name, tensor in self.partitions.own.items():
            if not OF_ADAPTER.search(name):
                yield base_name(name), self._merged(name, tensor)

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
        owner, _, leaf = name.rpartition(BASE)
        if leaf == "weight" and owner:
            layer = self.module.get_submodule(owner)
            with gathered(layer.parameters()):
                return merged_weight(layer)
        if SAVED in name:
            return self._whole(name.replace(SAVED, TRAINED_WHOLE)).to(tensor.dtype)
        return self._whole(name)

    def _whole(self, name: str) -> Tensor:
        """Return a whole copy of one weight, in its compute type."""
        tensor = self.partitions.own[name]
        with gathered([tensor]):
            return tensor.detach().clone()

    def base_identity(self) -> str:
        """Return the hash of the base's weights, gathered one at a time; the hash is cached."""
        if self._base is None:
            self._base = identity(_Base(self))
        return self._base

    def _base_places(self) -> dict[str, Place]:
        own = self.partitions.places()
        return {base_name(name): place for name, place in own.items() if not OF_ADAPTER.search(name)}

    @torch.no_grad()
    def _begin_again(self) -> None:
        self._base = None
        for name, place in self.partitions.places().items():
            if not OF_ADAPTER.search(name):
                continue
            if any(f".{factor}" in name for factor in FACTORS):
                place.store(torch.zeros(place.shape))
            elif TRAINED_WHOLE in name:
                place.store(self._whole(name.replace(TRAINED_WHOLE, SAVED)))
            elif LENGTHS in name:
                layer = self.module.get_submodule(name.partition(LENGTHS)[0])
                with gathered(layer.parameters()):
                    lengths = merged_weight(layer, lengths=False).norm(dim=1)
                place.store(lengths)


class _Base(Mapping[str, Tensor]):
    """A mapping of the base model's weights by their names without the adapter, each gathered when read."""

    def __init__(self, adapter: AdapterInParts) -> None:
        self.adapter = adapter
        own = adapter.partitions.own
        self.names = {base_name(name): name for name in own if not OF_ADAPTER.search(name)}

    def __getitem__(self, name: str) -> Tensor:
        return self.adapter._whole(self.names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
