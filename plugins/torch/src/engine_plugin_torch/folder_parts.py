"""A model folder from which each rank reads its own part: the checks of the folder and of the names in it.

Ranks on several machines read several copies of the folder. A fingerprint of the weights checks that the copies agree.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.contracts.weight_names import converts
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
        model: ``[model]``, with the role's path.
        shapes: shapes of the role's weights, by name.
        role: the role that the model is for; a value role gets a fresh head where the folder has none.
        what: owner of the weights, for messages.
        unused: patterns of the names that the folder may have and the model lacks.
        advice: advice for messages, if the folder cannot be read.

    Raises:
        DataError: weights are missing, unknown or of another shape.

    Attributes:
        bytes: bytes of weights read from the files so far.
    """

    def __init__(
        self,
        model: ModelConfig,
        shapes: Mapping[str, Sequence[int]],
        role: str,
        what: str = "this model",
        unused: Collection[str] = (),
        advice: str = "",
    ) -> None:
        folder, name = Path(model.path), f"{HEAD}.weight"
        self._shards = Shards(folder, "model", weight_files(folder))
        self.shapes = {name: list(shape) for name, shape in shapes.items()}
        self.bytes = 0
        self._fresh: dict[str, Tensor] = {}
        patterns = list(unused)
        if role in VALUE_ROLES:
            patterns += [rf"^{head}\." for head in LANGUAGE_HEADS]
            if name not in self._shards.shapes:
                head = nn.Linear(shapes[name][1], shapes[name][0], bias=False)
                reset_head(head, model.seed)
                self._fresh[name] = head.weight.detach()
        left = [n for n in self._shards.shapes if any(re.search(pattern, n) for pattern in patterns)]
        read = {name: shape for name, shape in self.shapes.items() if name not in self._fresh}
        self._shards.check(read, what, set(left) - read.keys(), advice)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        model: ModelConfig,
        shapes: Mapping[str, Sequence[int]],
        role: str,
        key: str,
        advice: str,
    ) -> FolderParts:
        """Return the reader for a transformers model.

        Args:
            module: the model, or a copy with whole shapes.
            model: as for the class, and so are ``shapes`` and ``role``.
            shapes: shapes of the model's weights.
            role: the role that the model is for.
            key: the option that asks for this, for messages.
            advice: advice for messages, if the folder cannot be read.

        Raises:
            ConfigError: the model's names differ from those in its files.
            DataError: weights are missing, unknown or of another shape.
        """
        kind = type(module).__name__
        if converts(module):
            raise ConfigError(
                f"{key} = 'sharded': {kind} is written under other names than its own. {advice}"
            )
        unused: Any = [
            *(re.escape(name) for name in getattr(module, "all_tied_weights_keys", None) or ()),
            *(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()),
        ]
        return cls(model, shapes, role, kind, unused, advice)

    def read(self, name: str, wanted: tuple[slice, ...]) -> Tensor:
        """Return a part ``[D0, ...]`` of a weight from the files, or of a fresh value head (equal on every rank)."""
        if name in self._fresh:
            return self._fresh[name][wanted]
        part = self._shards.read(name, wanted)
        self.bytes += part.numel() * part.element_size()
        return part

    def fingerprint(self) -> str:
        """Return a hash of the name, shape and first row of each weight; two models with one config differ in it."""
        digest = hashlib.blake2b(digest_size=16)
        for name, shape in sorted(self._shards.shapes.items()):
            row = self._shards.read(
                name, tuple(slice(0, min(1, n) if not at else n) for at, n in enumerate(shape))
            )
            digest.update(f"{name}{shape}".encode() + row.flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


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
