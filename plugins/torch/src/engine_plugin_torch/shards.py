r"""Sharded tensors as safetensors files, one per rank, which any number of ranks can read.

The metadata of torch.distributed.checkpoint is a pickle, so it is not used. Here each file's own header (JSON)
says where its parts lie in the whole tensors::

    weights-00000-of-00002.safetensors
        "lm_head.weight"  [49, 32]
        metadata: {"shards": "{\"lm_head.weight\": {\"shape\": [97, 32], \"at\": [0, 0]}}"}

Writing needs no other rank, so it can run in a thread. Of the ranks that hold the same part, the first
writes it. A file without such a header holds whole tensors: a checkpoint of one process.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine_core.errors import DataError, near
from engine_core.runs.state_files import FORMAT, STATE, load_json
from engine_plugin_torch.sharded import here, is_first_copy, like, span

KEY = "shards"


def shard_file(kind: str, rank: int, size: int) -> str:
    """Return the name of one rank's file."""
    return f"{kind}-{rank:05d}-of-{size:05d}.safetensors"


def own_parts(tensors: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copy the parts that this rank writes to host memory; return them with their places in the whole tensors.

    Args:
        tensors: sharded or plain tensors ``[D0, ...]``; plain ones are equal on all ranks, and rank 0 writes them.
        rank: this rank.
    """
    parts: dict[str, Tensor] = {}
    places: dict[str, Any] = {}
    for name, tensor in tensors.items():
        part = here(tensor)
        sharded = isinstance(tensor, DTensor)
        writes = is_first_copy(tensor) and bool(part.numel()) if sharded else rank == 0
        if not writes:
            continue
        parts[name] = part.to("cpu", copy=True).contiguous()
        places[name] = {"shape": list(tensor.shape), "at": [s.start for s in span(tensor)]}
    return parts, places


def write_parts(path: Path, parts: Mapping[str, Tensor], places: Mapping[str, Any]) -> None:
    """Write one rank's file.

    Args:
        path: the file.
        parts: parts by name, each ``[P0, ...]``.
        places: shape of the whole tensor and position of the part, by name.

    Raises:
        OSError: the file cannot be written; a part of it may exist.
    """
    try:
        save_file(dict(parts), path, metadata={KEY: json.dumps(places, sort_keys=True)})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error


def checkpoint_files(folder: Path, kind: str) -> list[Path]:
    """Return the files of one kind in a checkpoint: the file of one process, or one for each rank.

    Raises:
        DataError: files are missing.
    """
    whole = folder / f"{kind}.safetensors"
    if whole.is_file():
        return [whole]
    files = sorted(folder.glob(f"{kind}-*-of-*.safetensors"))
    if not files:
        raise DataError(f"{whole} is missing: this is not a whole checkpoint of a train engine.")
    last = files[0].stem.rpartition("-")[2]
    names = [shard_file(kind, rank, int(last)) for rank in range(int(last) if last.isdigit() else 0)]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{folder} lacks {', '.join(missing[:3])}: this is not a whole checkpoint.")
    return files


class Shards:
    """The tensors of one kind in a checkpoint, read a part at a time.

    Args:
        folder: folder of the checkpoint.
        kind: ``weights`` or ``optimizer``.
        files: files to read instead of the checkpoint's.

    Raises:
        DataError: files, or parts of a tensor, are missing.
    """

    def __init__(self, folder: Path, kind: str, files: Sequence[Path] | None = None) -> None:
        self.folder, self.kind = folder, kind
        self._opened: dict[Path, Any] = {}
        self.shapes: dict[str, list[int]] = {}
        # for each part: its file, its offset in the whole tensor, its shape
        self.parts: dict[str, list[tuple[Path, list[int], list[int]]]] = {}
        for file in checkpoint_files(folder, kind) if files is None else files:
            for name, shape, at, size_of_part in _entries(file):
                self.shapes[name] = shape
                self.parts.setdefault(name, []).append((file, at, size_of_part))
        for name, shape in self.shapes.items():
            held = sum(math.prod(size) for _, _, size in self.parts[name])
            if held != math.prod(shape):
                raise DataError(
                    f"{folder} holds {held} of {math.prod(shape)} values of '{name}'. Take another checkpoint."
                )

    def read(self, name: str, wanted: tuple[slice, ...]) -> Tensor:
        """Read the part ``wanted`` of a tensor ``[D0, ...]`` from all files that hold some of it."""
        shape = [span.stop - span.start for span in wanted]
        found: Tensor | None = None
        for file, at, size in self.parts[name]:
            common = [
                range(max(span.start, first), min(span.stop, first + count))
                for span, first, count in zip(wanted, at, size, strict=True)
            ]
            if not all(common):
                continue
            opened = self._file(file)
            piece = opened.get_slice(name)[_shifted(common, at)] if common else opened.get_tensor(name)
            if found is None:
                found = torch.empty(shape, dtype=piece.dtype)
            found[_shifted(common, [span.start for span in wanted])] = piece
        return torch.empty(shape) if found is None else found

    def _file(self, file: Path) -> Any:
        """Return the opened file; each is opened once, because opening reads the names of all tensors."""
        if file not in self._opened:
            self._opened[file] = safe_open(str(file), "pt")
        return self._opened[file]

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor ``[D0, ...]``."""
        return self.read(name, tuple(slice(0, size) for size in self.shapes[name]))

    def fill(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Read this rank's parts of the tensors ``[D0, ...]`` in place; ``what`` names their owner in messages.

        Raises:
            DataError: names or shapes differ; nothing was changed.
        """
        self.check({name: list(tensor.shape) for name, tensor in tensors.items()}, what)
        with torch.no_grad():
            for name, tensor in tensors.items():
                here(tensor).copy_(self.read(name, span(tensor)))

    def check(
        self, shapes: Mapping[str, list[int]], what: str, unused: Collection[str] = (), advice: str = ""
    ) -> None:
        """Check that the tensors have these names and shapes.

        Args:
            shapes: the expected shapes by name.
            what: owner of the tensors, for messages.
            unused: names that may be there in addition.
            advice: a sentence to add to messages.

        Raises:
            DataError: names or shapes differ.
        """
        left = sorted(self.shapes.keys() - shapes.keys() - set(unused))
        for name, shape in shapes.items():
            if name not in self.shapes:
                raise DataError(
                    f"{self.folder} has no weight '{name}' of {what}.{near(name, left or self.shapes)} {advice}".rstrip()
                )
            if self.shapes[name] != list(shape):
                raise DataError(
                    f"Weight '{name}' has shape {self.shapes[name]} in {self.folder}; expected {list(shape)}. "
                    f"{advice}".rstrip()
                )
        if left:
            raise DataError(f"Unknown weight '{left[0]}' for {what} in {self.folder}.{near(left[0], shapes)}")


def optimizer_tensors(shards: Shards, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read an optimizer's tensors ``[D0, ...]`` as ``name/key``; those of a parameter's shape are sharded like it."""
    found: dict[str, Tensor] = {}
    for path, shape in shards.shapes.items():
        parameter = parameters.get(path.rpartition("/")[0])
        if isinstance(parameter, DTensor) and shape == list(parameter.shape):
            part = shards.read(path, span(parameter)).to(here(parameter).device)
            found[path] = like(part, parameter)
        else:
            found[path] = shards.whole(path)
    return found


def _shifted(ranges: Sequence[range], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(r.start - first, r.stop - first) for r, first in zip(ranges, origin, strict=True))


def _entries(file: Path) -> Iterator[tuple[str, list[int], list[int], list[int]]]:
    """Yield the name, whole shape, offset and shape of each part in a file."""
    try:
        with safe_open(str(file), "pt") as opened:
            places = json.loads((opened.metadata() or {}).get(KEY, "{}"))
            for name in opened.keys():  # noqa: SIM118  not a mapping
                size = opened.get_slice(name).get_shape()
                place = places.get(name, {"shape": size, "at": [0] * len(size)})
                yield name, list(place["shape"]), list(place["at"]), list(size)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is no file of sharded tensors: {error}. Take another checkpoint.") from error


EXPERT = re.compile(r"\.experts\.(\d+\.)?")


def experts_apart(folder: Path) -> bool | None:
    """Return whether a checkpoint holds each expert's weights separately; None without experts or in another format."""
    if not (folder / STATE).is_file() or load_json(folder / STATE).get("format") != FORMAT:
        return None
    found = [match for name in Shards(folder, "weights").shapes if (match := EXPERT.search(name))]
    return any(match[1] for match in found) if found else None


def check_experts(folder: Path, was: str, now: str, apart: bool = False) -> str:
    """Return why an engine cannot read a checkpoint with its layout of experts; "" where it can.

    Args:
        folder: folder of the role, in the common format or another one.
        was: the engine that wrote the checkpoint.
        now: the engine that will read it.
        apart: ``now`` keeps each expert's weights separately, as Hugging Face folders do; else all experts of a layer
            are one tensor, as transformers keeps them in memory.
    """
    found = experts_apart(folder)
    if found is None or found == apart:
        return ""
    one, each = "all experts of a layer in one tensor", "each expert's weights by themselves"
    return (
        f"{folder.parent.name} was written with '{was}' and holds {each if found else one}; '{now}' reads "
        f"{each if apart else one}. Put '{was}' back, or begin a new run with its weights: `engine export RUN OUT`, "
        "then model.path = 'OUT'."
    )


check_experts_apart = functools.partial(check_experts, apart=True)
"""``check_experts`` of an engine that keeps each expert's weights by themselves."""
