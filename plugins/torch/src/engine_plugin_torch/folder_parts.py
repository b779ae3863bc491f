"""A model folder from which each rank reads its own part: the checks of the folder and of the names in it.

Ranks on several machines read several copies of the folder. A fingerprint of the weights checks that the copies agree.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.contracts.weight_names import converts, near
from engine_core.errors import ConfigError, DataError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_plugin_torch.shards import Shards
from engine_plugin_torch.value_models import LANGUAGE_HEADS, VALUE_ROLES, reset_head

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_plugin_torch.rank_group import RankGroup

log = logging.getLogger("engine")


def check_folder(path: str, role: str, adapted: bool, key: str, instead: str) -> None:
    """Refuse a folder that cannot be read in parts, before a model is built.

    Raises:
        ConfigError: ``path`` is no folder of safetensors, or the role has an adapter.
    """
    if adapted:
        raise ConfigError(
            f"{key} = 'sharded' cannot be combined with [{role}.lora]: an adapter's first weights are "
            f"drawn over the whole base. {instead}"
        )
    if not any(Path(path).glob("*.safetensors")):
        raise ConfigError(
            f"{key} = 'sharded': '{path}' is no folder with safetensors on this machine. {instead}"
        )


class FolderParts:
    """A reader for any part of each weight in a model folder.

    Args:
        module: the model, or a copy with whole shapes.
        model: ``[model]``, with the role's path.
        shapes: shapes of the model's weights, by name.
        role: the role that the model is for.
        key: the option that asks for this, for messages.
        instead: advice for messages, if the folder cannot be read.

    Raises:
        ConfigError: the model's names differ from those in its files.
        DataError: weights are missing, unknown or of another shape.

    Attributes:
        bytes: bytes of weights read from the files so far.
    """

    def __init__(
        self,
        module: nn.Module,
        model: ModelConfig,
        shapes: Mapping[str, list[int]],
        role: str,
        key: str,
        instead: str,
    ) -> None:
        folder = Path(model.path)
        self._shards = Shards(folder, "model", weight_files(folder))
        self._fresh = check_names(module, self._shards, shapes, role, key, instead)
        self._seed, self.shapes, self.bytes = model.seed, shapes, 0

    def read(self, name: str, wanted: tuple[slice, ...]) -> Tensor:
        """Return a part ``[D0, ...]`` of a weight from the files, or of a fresh value head (equal on every rank)."""
        if name in self._fresh:
            rows, columns = self.shapes[name]
            head = nn.Linear(columns, rows, bias=False)
            reset_head(head, self._seed)
            return head.weight.detach()[wanted]
        part = self._shards.read(name, wanted)
        self.bytes += part.numel() * part.element_size()
        return part

    def fingerprint(self) -> str:
        """Return the fingerprint of the folder's weights."""
        return fingerprint(self._shards)


def read_together(read: Callable[[], FolderParts], path: str, role: str, ranks: RankGroup) -> None:
    """Read this rank's parts of a folder; fail on all ranks if one fails or has other weights. Collective.

    Args:
        read: reads this rank's parts without communication and returns the reader.
        path: path of the folder.
        role: the role that the model is for.
        ranks: the ranks of the role.

    Raises:
        Exception: this rank's own error.
        DataError: another rank failed, or has a folder with other weights.
    """
    error: Exception | None = None
    found = ""
    try:
        parts = read()
        log.info("%s: this rank read %.1f MiB of '%s'.", role, parts.bytes / 2**20, path)
        found = parts.fingerprint()
    except Exception as problem:
        error = problem
    ranks.share(error, f"Reading parts of '{path}'", DataError)
    prints = ranks.texts(found)
    if other := next((rank for rank, text in enumerate(prints) if text != prints[0]), None):
        raise DataError(
            f"The folder '{path}' of role '{role}' holds other weights on the machine of rank {other} than on that of rank 0: "
            "the model would be a mixture. Copy one of them to all machines."
        )


def fingerprint(shards: Shards) -> str:
    """Return a hash of the name, shape and first row of each weight; two models with one config differ in it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, shape in sorted(shards.shapes.items()):
        row = shards.read(
            name, tuple(slice(0, size if at else min(1, size)) for at, size in enumerate(shape))
        )
        digest.update(f"{name}{shape}".encode() + row.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the files that ``save_pretrained`` wrote: one file, or those in the index.

    Raises:
        DataError: the index is broken, or a file is missing.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / Path(name).name for name in names]  # of this folder, whatever the index says
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{index} is no index of weights: {error}. Take another copy of the model."
        ) from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"{folder} lacks {', '.join(missing[:3])}, which its index names.")
    return files


def check_names(
    module: nn.Module, shards: Shards, shapes: Mapping[str, list[int]], role: str, key: str, instead: str
) -> set[str]:
    """Check the names and shapes in a folder; return the names it may lack (a fresh value head).

    Args:
        module: the model, or a copy with whole shapes.
        shards: the folder's weights.
        shapes: shapes of the model's weights, by name.
        role: the role that the model is for.
        key: the option that asks for this, for messages.
        instead: advice for messages, if the folder cannot be read.

    Raises:
        ConfigError: the model's names differ from those in its files.
        DataError: weights are missing, unknown or of another shape.
    """
    kind, unknown = type(module).__name__, set(shards.shapes) - set(shapes)
    if converts(module):
        raise ConfigError(f"{key} = 'sharded': {kind} is written under other names than its own. {instead}")
    fresh = {f"{HEAD}.weight"} - set(shards.shapes) if role in VALUE_ROLES else set()
    if missing := sorted(set(shapes) - set(shards.shapes) - fresh):
        raise DataError(
            f"{shards.folder} has no weight '{missing[0]}' of {kind}.{near(missing[0], unknown)} {instead}"
        )
    free: Any = [
        *(re.escape(name) for name in getattr(module, "all_tied_weights_keys", None) or ()),
        *(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()),
        *((rf"^{name}\." for name in LANGUAGE_HEADS) if role in VALUE_ROLES else ()),
    ]
    if left := sorted(n for n in unknown if not any(re.search(pattern, n) for pattern in free)):
        raise DataError(
            f"{shards.folder} holds '{left[0]}', which {kind} has not. Is it a folder of another model?"
        )
    for name, shape in shapes.items():
        if name not in fresh and shards.shapes[name] != shape:
            raise DataError(
                f"Weight '{name}' has shape {shards.shapes[name]} in {shards.folder}; expected {shape}. "
                "Is model.override right?"
            )
    return fresh
