"""Errors of a worker as plain values, and the same errors rebuilt in the controller.

Errors of ``engine_core.errors`` keep class, message and exit code; common errors of Python keep class and message. Any
other becomes a ``RuntimeError`` that names it. The worker's traceback is the cause of the rebuilt error.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch

from engine_core import errors

KNOWN: Mapping[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(errors.ConfigError, errors.PluginError, errors.DataError),
        *(errors.EnvironmentProblem, errors.TrainingFailed, errors.SamplerLost),
        *(ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, NotImplementedError),
        *(AssertionError, MemoryError, ArithmeticError, ZeroDivisionError, torch.OutOfMemoryError),
    )
}


class InWorker(Exception):
    """An error that holds a worker's traceback, shown as the cause of the rebuilt error."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(f"in worker {rank}:\n{text}")


def pack(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values."""
    is_text = len(error.args) == 1 and isinstance(error.args[0], str)
    found = {
        "message": error.args[0] if is_text else str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "traceback": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, OSError):
        name = error.filename if isinstance(error.filename, str) else None
        return found | {"type": "OSError", "arguments": [error.errno, error.strerror, name]}
    for cls in type(error).__mro__:
        if KNOWN.get(cls.__name__) is cls and (cls is type(error) or issubclass(cls, errors.EngineError)):
            return found | {"type": cls.__name__}
    return found | {"type": "RuntimeError", "message": f"{type(error).__name__}: {error}"}


def unpack(packed: Mapping[str, Any], rank: int) -> Exception:
    """Rebuild an error that the worker of this rank packed."""
    kind, message = packed["type"], packed["message"]
    error: Exception
    if kind == "OSError":
        error = OSError(*packed["arguments"]) if packed["arguments"][0] else OSError(message)
    elif kind == "ConfigError":
        error = errors.ConfigError(message.splitlines() or [message])
    else:
        error = KNOWN[kind](message)
    for note in packed["notes"]:
        error.add_note(note)
    error.__cause__ = InWorker(rank, packed["traceback"])
    return error
