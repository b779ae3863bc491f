"""Sources of a model's weights: a folder, of which each rank reads its slices, a checkpoint, or a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

from engine_core.contracts.weight_names import near, own_weights
from engine_core.errors import DataError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_plugin_torch.folder_parts import weight_files
from engine_plugin_torch.model_loading import has_no_weights, load_model
from engine_plugin_torch.value_models import (
    LANGUAGE_HEADS,
    VALUE_ROLES,
    load_value_model,
    reset_head,
    value_class,
)
from engine_plugin_torch.weights import published_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from engine_core.config import ModelConfig
    from engine_plugin_torch.shards import Shards

Read = Callable[[str], Any]
"""Gives one tensor by its name: whole, or something with ``get_shape`` and slices."""

CPU = torch.device("cpu")
FREE = ("rotary_emb.inv_freq",)  # entries of old folders that are no weights


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
        return dict(published_weights(whole)).__getitem__
    folder = Path(model.path)
    if not folder.is_dir():
        folder = Path(snapshot_download(model.path, allow_patterns=["*.safetensors", "*.json"]))
    return Folder(folder, shapes, role, model.seed)


class Folder:
    """A reader of a folder's weights, as safetensors slices that are loaded on use.

    Args:
        folder: a folder as ``save_pretrained`` writes it.
        shapes: by name, the shapes of the required weights; a missing value head is initialized.
        role: the role, which decides whether a language-model head may be left over.
        seed: seed of a fresh value head.

    Raises:
        DataError: weights are missing, left over or of another shape.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], role: str, seed: int) -> None:
        self._slices: dict[str, Any] = {}
        self._files = []
        for file in weight_files(folder):
            try:
                opened = safe_open(str(file), "pt")
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{file} is no safetensors file: {error}. Take another copy of the model."
                ) from error
            self._files.append(opened)
            self._slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  not a mapping
        value = role in VALUE_ROLES
        self._fresh: dict[str, Tensor] = {}
        name = f"{HEAD}.weight"
        if value and name not in self._slices:
            head = nn.Linear(shapes[name][1], 1, bias=False)
            reset_head(head, seed)
            self._fresh[name] = head.weight.detach()
        has = {
            **{n: tuple(s.get_shape()) for n, s in self._slices.items()},
            **{n: tuple(t.shape) for n, t in self._fresh.items()},
        }
        free = (*LANGUAGE_HEADS,) if value else ()
        tied = set() if "lm_head.weight" in shapes else {"lm_head.weight"}
        extra = {n for n in has if n in tied or n.endswith(FREE) or n.partition(".")[0] in free}
        check_names({n: shape for n, shape in has.items() if n not in extra}, shapes, str(folder))

    def __call__(self, name: str) -> Any:
        return self._fresh[name] if name in self._fresh else self._slices[name]


def check_names(has: Mapping[str, Iterable[int]], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse weights of another model.

    Raises:
        DataError: names are missing or left over, or a shape differs.
    """
    unknown = sorted(has.keys() - shapes.keys())
    if missing := sorted(shapes.keys() - has.keys()):
        raise DataError(f"{where} has no weight '{missing[0]}' of this model.{near(missing[0], unknown)}")
    if unknown:
        raise DataError(
            f"{where} holds '{unknown[0]}', which this model has not. Is it one of another model?"
        )
    for name, shape in shapes.items():
        if tuple(has[name]) != tuple(shape):
            raise DataError(
                f"Weight '{name}' has shape {list(has[name])} in {where}; expected {list(shape)}. Is model.override right?"
            )


class FromShards:
    """A reader of a checkpoint's tensors.

    Args:
        shards: the checkpoint's shards.
        suffix: appended to a weight's name, for optimizer state: ``/exp_avg``.
    """

    def __init__(self, shards: Shards, suffix: str = "") -> None:
        self.shards, self.suffix = shards, suffix

    def __call__(self, name: str) -> _Part:
        return _Part(self.shards, name + self.suffix)


class _Part:
    def __init__(self, shards: Shards, name: str) -> None:
        self.shards, self.name = shards, name

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.shards.shapes[self.name]

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        return self.shards.read(self.name, wanted)


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

    def __call__(self, name: str) -> Tensor:
        while name not in self._kept:
            if not self._next():
                raise DataError(f"The weight '{name}' did not come. Those that came before it were taken.")
        self._left[name] -= 1
        return self._kept[name] if self._left[name] else self._kept.pop(name)

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
        source: folder whose ``generation_config.json``, if any, the model gets.
    """
    kind: Any = value_class(config) if role in VALUE_ROLES else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        module: PreTrainedModel = kind(config)
    if (Path(source) / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(source)
    return module


def own_order(config: PretrainedConfig, role: str) -> list[str]:
    """Return the names of a transformers model's own weights, in its order."""
    return list(own_weights(blank_module(config, role)))
