"""Sources of a model's weights: a folder, of which each rank reads its slices, a checkpoint, or a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engine_core.contracts.weight_names import own_weights
from engine_core.errors import DataError, near
from engine_plugin_torch.folder_parts import FolderParts
from engine_plugin_torch.model_loading import has_no_weights, load_model, read_generation_config
from engine_plugin_torch.value_models import VALUE_ROLES, load_value_model, value_class
from engine_plugin_torch.weights import published_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from engine_core.config import ModelConfig
    from engine_plugin_megatron.models.places import Slices
    from engine_plugin_torch.shards import Shards

Read = Callable[[str, "Slices"], Tensor]
"""Gives a part of one tensor by its name."""

CPU = torch.device("cpu")
FREE = r"rotary_emb\.inv_freq$"  # entries of old folders that are no weights


def first_weights(
    model: ModelConfig, role: str, live: nn.Module | None, shapes: Mapping[str, tuple[int, ...]]
) -> Read:
    """Return the function with which ``weights.load`` reads a model's first weights.

    A folder with only a config, and a model given from Python, are temporarily whole in every rank's host memory.

    Args:
        model: ``[model]``, with the role's path.
        role: the role, which decides between a language model and a value model.
        live: a model given from Python.
        shapes: by name, the shapes of the weights of the role's model.

    Raises:
        ConfigError: the folder cannot be read.
        DataError: weights are missing or left over.
    """
    if live is not None or has_no_weights(model.path):
        if role in VALUE_ROLES:
            whole = load_value_model(model, CPU, torch.float32, live)
        else:
            whole = live if live is not None else load_model(model, CPU, torch.float32)
        return in_memory(dict(published_weights(whole)), shapes)
    folder = model.path
    if not Path(folder).is_dir():
        folder = snapshot_download(folder, allow_patterns=["*.safetensors", "*.json"])
    unused = [FREE, *(() if "lm_head.weight" in shapes else (r"^lm_head\.weight$",))]
    return FolderParts(model.model_copy(update={"path": folder}), shapes, role, unused=unused).read


def in_memory(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Read:
    """Return a reader of whole tensors ``[D0, ...]``.

    Raises:
        DataError: a tensor has another shape than in ``shapes``.
    """
    for name, tensor in weights.items():
        if tuple(tensor.shape) != tuple(shapes.get(name, tensor.shape)):
            raise DataError(f"Weight '{name}' has shape {list(tensor.shape)}; expected {list(shapes[name])}.")
    return lambda name, box: weights[name][box]


def of_checkpoint(shards: Shards, suffix: str = "") -> Read:
    """Return a reader of a checkpoint's tensors; ``suffix`` is appended to names, for optimizer state: ``/exp_avg``."""
    return lambda name, box: shards.read(name + suffix, box)


class FromStream:
    """A reader of a stream's tensors in any order. A tensor that arrives early is kept until its last read.

    Args:
        stream: names and whole tensors.
        shapes: by name, the shapes of the weights that must arrive.
        wanted: how often each name will be read; other tensors are not kept, so no rank holds the whole model.

    Raises:
        DataError: a name or a shape does not fit.
    """

    def __init__(
        self,
        stream: Iterable[tuple[str, Tensor]],
        shapes: Mapping[str, tuple[int, ...]],
        wanted: Mapping[str, int],
    ) -> None:
        self._stream: Iterator[tuple[str, Tensor]] = iter(stream)
        self._shapes, self._left, self._kept = shapes, dict(wanted), dict[str, Tensor]()
        self._came: set[str] = set()

    def __call__(self, name: str, box: Slices) -> Tensor:
        while name not in self._kept:
            if not self._next():
                raise DataError(f"The weight '{name}' did not come. Those that came before it were taken.")
        self._left[name] -= 1
        return (self._kept[name] if self._left[name] else self._kept.pop(name))[box]

    def finish(self) -> None:
        """Read the stream to its end, since it may be collective.

        Raises:
            DataError: a weight did not arrive.
        """
        self._left.clear()
        self._kept.clear()
        while self._next():
            pass
        if left := sorted(self._shapes.keys() - self._came):
            some = ", ".join(left[:5])
            raise DataError(
                f"{len(left)} of {len(self._shapes)} weights did not come: {some}. Those that came were taken."
            )

    def _next(self) -> bool:
        for name, tensor in self._stream:
            if name not in self._shapes:
                raise DataError(f"Unknown weight '{name}' for this model." + near(name, self._shapes))
            if tuple(tensor.shape) != tuple(self._shapes[name]):
                raise DataError(
                    f"Weight '{name}' has shape {list(tensor.shape)}; expected {list(self._shapes[name])}."
                )
            if self._left.get(name):
                self._kept[name] = tensor
            self._came.add(name)
            return True
        return False


def blank_module(config: PretrainedConfig, role: str, source: str = "") -> PreTrainedModel:
    """Build the transformers model of this role's folder, with weights on ``meta``.

    Args:
        config: the model's config.
        role: the role, which decides between a language model and a value model.
        source: folder or hub name whose ``generation_config.json``, if any, the model gets.
    """
    kind: Any = value_class(config) if role in VALUE_ROLES else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        module: PreTrainedModel = kind(config)
    if source:
        read_generation_config(module, source)
    return module


def own_order(config: PretrainedConfig, role: str) -> list[str]:
    """Return the names of a transformers model's own weights, in its order."""
    return list(own_weights(blank_module(config, role)))
