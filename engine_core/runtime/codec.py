"""What crosses between controller and workers, as a JSON header and raw bytes. No pickle.

The set is closed: plain values, tensors, and the dataclasses of the vocabulary. Anything else is refused by the
sender, with its place, and nothing but these is ever made by the receiver, whatever the bytes say.

In the header plain values are themselves; everything else is an object with a ``"$"``::

    {"$": "tensor", "dtype": "float32", "shape": [3], "at": 16}       bytes 16.. of the payload
    {"$": "LossCall", "fields": {"name": "nll", ...}}
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_core.engines.base import Layout
from engine_core.types import (
    Batch,
    LossCall,
    Prompt,
    Request,
    Rollout,
    Sampling,
    StepOutput,
    TrainOutput,
)
from engine_core.weight_sync import SyncResult

CLASSES: Mapping[str, type] = {
    cls.__name__: cls
    for cls in (
        *(Batch, LossCall, Prompt, Request, Rollout, Sampling, StepOutput, TrainOutput),
        *(Layout, SyncResult),
    )
}
"""The dataclasses that cross."""

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
TEXTS: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "path": (Path, str, Path),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
}
"""Values that cross as text: rows of Parquet files have them."""
PLAIN = frozenset({int, float, bool, str, type(None)})
"""Types that are themselves in the header; most values are lists of them, such as token ids."""
ALIGNMENT = 16  # of a tensor's bytes in the payload


class NotOurs(ValueError):
    """Bytes that no ``encode`` of ours wrote."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One value, ready to be sent any number of times."""

    header: bytes
    buffers: list[memoryview]  # the payload, one after another

    @property
    def payload_bytes(self) -> int:
        """Length of the payload."""
        return sum(len(buffer) for buffer in self.buffers)


def encode(value: Any) -> Encoded:
    """A value as bytes; the bytes of CPU tensors are not copied.

    Raises:
        TypeError: something in it does not cross between processes; the message says where it stands.
    """
    writer = _Writer()
    tree = writer.tree(value, "value")
    return Encoded(json.dumps(tree, separators=(",", ":")).encode(), writer.buffers)


def decode(header: bytes, payload: bytearray) -> Any:
    """The value; its tensors share the memory of ``payload``.

    Raises:
        NotOurs: it is no encoded value.
    """
    try:
        return _Reader(payload).value(json.loads(header))
    except NotOurs:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError) as error:
        raise NotOurs(f"No encoded value: {type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.prompts: dict[int, int] = {}  # by identity: the rollouts of a group share their prompt
        self._at = 0

    def tree(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | float):
            return int(value) if isinstance(value, int) else float(value)
        if isinstance(value, list):
            if PLAIN.issuperset(map(type, value)):
                return value
            return [self.tree(entry, f"{where}[{number}]") for number, entry in enumerate(value)]
        if isinstance(value, tuple):
            return {"$": "tuple", "items": self.tree(list(value), where)}
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, bytes):
            return {"$": "bytes", "at": self._put(memoryview(value)), "size": len(value)}
        for kind, (cls, write, _) in TEXTS.items():
            if isinstance(value, cls):
                return {"$": kind, "text": write(value)}
        if CLASSES.get(type(value).__name__) is type(value):
            return self._dataclass(value, where)
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which does not cross between "
            f"processes. Plain values, tensors and {', '.join(CLASSES)} do."
        )

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.tree(entry, f"{where}.{key}") for key, entry in value.items()}
        pairs = [
            (self.tree(k, f"a key of {where}"), self.tree(v, f"{where}[{k!r}]")) for k, v in value.items()
        ]
        return {"$": "dict", "items": pairs}

    def _dataclass(self, value: Any, where: str) -> Any:
        if isinstance(value, Prompt):
            number = self.prompts.get(id(value))
            if number is not None:
                return {"$": "same", "prompt": number}
            self.prompts[id(value)] = len(self.prompts)
        name = type(value).__name__
        fields = [field.name for field in dataclasses.fields(value)]
        return {"$": name, "fields": {f: self.tree(getattr(value, f), f"{where}.{f}") for f in fields}}

    def _tensor(self, value: Tensor) -> Any:
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise TypeError(f"Tensors of {name} do not cross between processes.")
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        return {"$": "tensor", "dtype": name, "shape": list(value.shape), "at": self._put(data)}

    def _put(self, data: memoryview) -> int:
        """Where the bytes will lie in the payload."""
        if gap := -self._at % ALIGNMENT:
            self.buffers.append(memoryview(bytes(gap)))
            self._at += gap
        at = self._at
        if len(data):
            self.buffers.append(data)
            self._at += len(data)
        return at


class _Reader:
    def __init__(self, payload: bytearray) -> None:
        self.payload = payload
        self.prompts: list[Prompt] = []

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            if PLAIN.issuperset(map(type, tree)):
                return tree
            return [self.value(entry) for entry in tree]
        if not isinstance(tree, dict):
            return tree
        kind = tree.get("$")
        if kind is None:
            return {key: self.value(entry) for key, entry in tree.items()}
        if kind == "tuple":
            return tuple(self.value(tree["items"]))
        if kind == "dict":
            return {self.value(key): self.value(entry) for key, entry in tree["items"]}
        if kind == "tensor":
            return self._tensor(tree["dtype"], tree["shape"], tree["at"])
        if kind == "bytes":
            return bytes(self._bytes(tree["at"], tree["size"]))
        if kind == "same":
            return self.prompts[_index(tree["prompt"], len(self.prompts))]
        if kind in TEXTS:
            return TEXTS[kind][2](tree["text"])
        return self._dataclass(kind, tree["fields"])

    def _dataclass(self, kind: Any, fields: Any) -> Any:
        if kind not in CLASSES:
            raise NotOurs(f"No encoded value: '{kind:.40}' is no class that crosses between processes.")
        cls = CLASSES[kind]
        made = cls(**{name: self.value(entry) for name, entry in fields.items()})
        if isinstance(made, Prompt):
            self.prompts.append(made)
        return made

    def _tensor(self, dtype: str, shape: list[int], at: int) -> Tensor:
        found = DTYPES[dtype]
        count = math.prod(_index(size, 1 << 62) for size in shape)
        if count == 0:
            return torch.empty(shape, dtype=found)
        self._bytes(at, count * found.itemsize)
        return torch.frombuffer(self.payload, dtype=found, count=count, offset=at).reshape(shape)

    def _bytes(self, at: int, size: int) -> memoryview:
        """A part of the payload, which must lie within it."""
        if _index(at, 1 << 62) + _index(size, 1 << 62) > len(self.payload):
            raise NotOurs(f"No encoded value: bytes {at} to {at + size} of {len(self.payload)}.")
        return memoryview(self.payload)[at : at + size]


def _index(value: Any, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise NotOurs(f"No encoded value: {value!r:.40} is no number from 0 to {end - 1}.")
    return value
