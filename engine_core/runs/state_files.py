"""Files of training state without pickle: tensors in safetensors, everything else in JSON."""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from engine_core.errors import DataError, PluginError

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state.json"
FORMAT = 1
"""Of the files that the reference engine and those that shard it write, each of which reads those of the others."""
PLAIN = frozenset({int, float, bool, str, type(None)})


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to one safetensors file.

    Args:
        path: the file.
        tensors: by name, each of any shape ``[D1, ..., Dn]`` and on any device.

    Raises:
        OSError: the file cannot be written; a part of it may exist.
    """
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name, on the CPU, with the shapes ``[D1, ..., Dn]`` that were saved.

    Raises:
        DataError: the file is missing or is not a safetensors file.
    """
    from safetensors.torch import load_file

    if not path.is_file():
        raise DataError(f"{path} is missing: this is not a whole checkpoint of a train engine.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is no safetensors file: {error}. Take another checkpoint.") from error


def plain_state(owner: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state as JSON gives it back.

    Args:
        owner: what the state is of, for messages.
        state: values by name.

    Raises:
        PluginError: JSON cannot hold one of the values, or gives another back; the message has its name.
    """
    copied = {}
    for name, value in state.items():
        try:
            if not _has_text_keys(value):
                raise TypeError("a dict has keys that are no text, and would have other keys after a resume")
            copied[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as exc:
            raise PluginError(
                f"{owner}: state() gives '{name}' = {reprlib.repr(value)}, which cannot be written as JSON: {exc}. "
                "Return numbers, texts, lists, and dicts with keys of text."
            ) from exc
    return copied


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(entry) for key, entry in value.items())
    if isinstance(value, list | tuple) and not set(map(type, value)) <= PLAIN:
        return all(map(_has_text_keys, value))
    return True


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values to a JSON file; a value that is not plain raises ``TypeError``."""
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


def load_json(path: Path) -> dict[str, Any]:
    """Return the values that ``save_json`` wrote.

    Raises:
        DataError: the file is missing or holds no JSON object.
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
    """Wrap code that reads values of a file.

    Raises:
        DataError: a value has another form than this version reads; names the file.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{path} does not hold what this version reads ({what:.200}). Take another checkpoint, or the version "
            "that wrote this one."
        ) from error
