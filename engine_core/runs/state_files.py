"""Files of training state without pickle: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine_core.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state.json"
FORMAT = 1
"""Of the files that the reference engine and those that shard it write, each of which reads those of the others."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file.

    Raises:
        OSError: it cannot be written; a part of it may be there.
    """
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU.

    Raises:
        DataError: it is missing, or no safetensors file.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing: this is not a whole checkpoint of a train engine.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is no safetensors file: {error}. Take another checkpoint.") from error


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Plain values only; anything else is an error."""
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def load_json(path: Path) -> dict[str, Any]:
    """What ``save_json`` wrote.

    Raises:
        DataError: it is missing, or something else.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing: this is not a whole checkpoint of a train engine.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no state of a train engine: {error}. Take another checkpoint.") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} is no state of a train engine: it holds no table. Take another checkpoint.")
    return values


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within it values of a file are taken up; those of another form are a ``DataError`` that names the file."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{path} does not hold what this version reads ({what:.200}). Take another checkpoint, or the version "
            "that wrote this one."
        ) from error
