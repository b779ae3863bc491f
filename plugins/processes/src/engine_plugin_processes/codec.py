"""The encoding of messages between controller and workers: a JSON header and raw bytes. No pickle.

The set of types is closed: plain values, tensors, and the dataclasses of ``message_types``. The sender refuses any
other value and names its place. The receiver makes no other object, whatever the bytes are.

In the header plain values are themselves; everything else is an object with a ``"$"``::

    {"$": "tensor", "dtype": "float32", "shape": [3], "at": 16}       bytes 16.. of the payload
    {"$": "LossCall", "fields": {"name": "nll", ...}}

A list of requests or rollouts is encoded by field, since a controller reads and writes thousands a step::

    {"$": "rows", "of": "Rollout", "columns": [["1:0:0", "1:0:1"], {"$": "prompts", ...}, {"$": "cat", ...}, ...]}
    {"$": "cat", "dtype": "int64", "sizes": [700, 212], "at": 0}      tensors [700] and [212], one after another
    {"$": "each", "value": ...}                                       the same in all rows
    null                                                              the default of the field in all rows
    {"$": "prompts", "new": {"$": "rows", ...}, "at": [0, 0, 1]}      the message's prompts, by number
    {"$": "prompts", "new": {"$": "texts", "of": [[0, 96]]}, ...}     as JSON in the payload, for several messages
    {"$": "prompts", "new": {"$": "ids", "of": ["train:17"]}, ...}    to a receiver that has the prompts

The columns of a batch, of which every rank receives its share, are encoded together::

    {"$": "columns", "count": 912, "of": [["loss_mask", "bool", 7296], ["weights", "float32", 8208]]}
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine_core.types import Prompt
from engine_plugin_processes.message_types import (
    CLASSES,
    DEFAULTS,
    DTYPES,
    ENDLESS,
    FIELDS,
    FIELDS_OF,
    NAMES,
    PLAIN,
    ROWS,
    TEXTS,
)

AS_TEXT = json.JSONEncoder(
    separators=(",", ":"), check_circular=False
)  # trees are made here, without circles
DECODER = json.JSONDecoder()
ALIGNMENT = 16  # of a tensor's bytes in the payload
NOTHING = memoryview(b"")
GAPS = tuple(memoryview(bytes(size)) for size in range(ALIGNMENT))


class DecodeError(ValueError):
    """An error: the bytes were not written by ``encode``."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is ready to be sent any number of times."""

    header: bytes
    buffers: list[memoryview]  # the payload, in order

    @property
    def payload_bytes(self) -> int:
        """The length of the payload in bytes."""
        return sum(len(buffer) for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor to be sent whose rows lie in several buffers; the write to the socket joins them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    buffers: Sequence[memoryview]  # of rows, in order

    def dim(self) -> int:
        """Return the number of dimensions, as ``Tensor.dim`` does."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of values, as ``Tensor.numel`` does."""
        return math.prod(self.shape)


Texts = dict[int, bytes]
"""Encoded prompts by ``id``, reused by messages with the same prompts; each prompt must live as long as the table."""


def encode(value: Any, prompts: bool = True, texts: Texts | None = None) -> Encoded:
    """Encode a value; the bytes of CPU tensors are not copied.

    Args:
        value: of the closed set.
        prompts: False: of a prompt only its id is sent, to a receiver that has the prompt.
        texts: encoded prompts, for lists of requests; new prompts are added.

    Raises:
        TypeError: a part of the value is not of the closed set; the message names its place.
    """
    writer = _Writer(prompts, texts)
    tree = writer.tree(value, "value")
    return Encoded(_text(tree), writer.buffers)


def decode(header: bytes, payload: bytearray) -> Any:
    """Decode a value; its tensors share the memory of ``payload``.

    Raises:
        DecodeError: the bytes are no encoded value.
    """
    try:
        tree = _parsed(str(header, "utf-8"))
        return _Reader(payload).value(tree) if b"$" in header or b"\\" in header else tree
    except DecodeError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError) as error:
        raise DecodeError(f"No encoded value: {type(error).__name__}: {error}") from error


VECTORS = (Tensor, Pieces)


def _counts(column: Any) -> bool:
    """Return whether a column of ``_Writer._rows`` has a value per row: it is not omitted or one value for all."""
    return column is not None and not (isinstance(column, dict) and column["$"] == "each")


class _Writer:
    """An encoder of values into a JSON tree and the buffers of a payload."""

    def __init__(self, whole_prompts: bool, texts: Texts | None = None) -> None:
        self.whole_prompts, self.texts = whole_prompts, texts if whole_prompts else None
        self.buffers: list[memoryview] = []
        self.prompts: dict[int, int] = {}  # by identity: the rollouts of a group share their prompt
        self._at = 0

    def tree(self, value: Any, where: str) -> Any:
        """Return ``value`` as a JSON tree; ``where`` names its place in error messages.

        Raises:
            TypeError: a type that does not cross between processes.
        """
        if type(value) in PLAIN:
            return value
        if isinstance(value, str):
            return value
        if isinstance(value, int | float):
            return int(value) if isinstance(value, int) else float(value)
        if isinstance(value, list):
            kinds = set(map(type, value))
            if kinds <= PLAIN:
                return value
            if kinds <= ROWS and len(kinds) == 1:
                return self._column(value, where)
            return [self.tree(entry, f"{where}[{number}]") for number, entry in enumerate(value)]
        if isinstance(value, tuple):
            return {"$": "tuple", "items": self.tree(list(value), where)}
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if isinstance(value, Tensor | Pieces):
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
        if all(type(key) is str and key[:1] != "$" for key in value):
            if value and all(type(column) in VECTORS for column in value.values()):
                return self._columns(value)
            return {key: self.tree(entry, f"{where}.{key}") for key, entry in value.items()}
        pairs = [
            (self.tree(k, f"a key of {where}"), self.tree(v, f"{where}[{k!r}]")) for k, v in value.items()
        ]
        return {"$": "dict", "items": pairs}

    def _dataclass(self, value: Any, where: str) -> Any:
        cls = type(value)
        if cls is Prompt:
            if not self._is_new(value):
                return {"$": "same", "prompt": self.prompts[id(value)]}
            if not self.whole_prompts:
                value = Prompt(value.id, [], "")
        fields = {f: self.tree(getattr(value, f), f"{where}.{f}") for f in FIELDS[cls]}
        return {"$": cls.__name__, "fields": fields}

    # -- lists of requests and rollouts, by field -----------------------------

    def _rows(self, values: list[Any], cls: type, where: str) -> Any:
        columns: list[Any] = []
        fields = zip(*map(FIELDS_OF[cls], values), strict=True)
        for name, default, field in zip(FIELDS[cls], DEFAULTS[cls], fields, strict=True):
            left_out = type(field[0]) is type(default) and _all_are(field, default)
            columns.append(None if left_out else self._column(list(field), f"{where}[].{name}"))
        if not any(map(_counts, columns)):  # one column must determine the number of rows
            columns[0] = [getattr(value, FIELDS[cls][0]) for value in values]
        return {"$": "rows", "of": cls.__name__, "columns": columns}

    def _column(self, values: list[Any], where: str) -> Any:
        """Encode one field of all rows."""
        kinds, first = set(map(type, values)), values[0]
        if kinds <= PLAIN:
            return values
        kind = kinds.pop()
        if kinds:
            return [self.tree(entry, where) for entry in values]
        if kind is Prompt:
            return self._prompts(values, where)
        if kind in ROWS:
            return self._rows(values, kind, where)
        if kind is tuple and values.count(first) == len(values):
            return {"$": "each", "value": self.tree(first, where)}
        if kind is Tensor and all(v.dim() == 1 and v.dtype == first.dtype for v in values):
            return self._cat(values)
        return [self.tree(entry, where) for entry in values]

    def _prompts(self, values: list[Prompt], where: str) -> Any:
        seen = dict(zip(map(id, values), values, strict=True))  # the requests of a group have one prompt
        new = [value for value in seen.values() if self._is_new(value)]
        at = [self.prompts[id(value)] for value in values]
        if self.texts is not None and new:
            texts = [text for prompt in new if (text := self._prompt_text(prompt, self.texts, where))]
            if len(texts) == len(new):
                made = {"$": "texts", "of": [(self._put(memoryview(text), 1), len(text)) for text in texts]}
                return {"$": "prompts", "new": made, "at": at}
        if not self.whole_prompts:
            return {"$": "prompts", "new": {"$": "ids", "of": [prompt.id for prompt in new]}, "at": at}
        return {"$": "prompts", "new": self._rows(new, Prompt, where) if new else None, "at": at}

    @staticmethod
    def _prompt_text(prompt: Prompt, texts: Texts, where: str) -> bytes:
        """Return the encoded prompt from ``texts``, adding it if new; empty if it has values that need the payload."""
        if (found := texts.get(id(prompt))) is None:
            alone = _Writer(whole_prompts=True)
            tree = alone.tree(prompt, where)
            found = texts[id(prompt)] = b"" if alone.buffers else _text(tree)
        return found

    def _is_new(self, prompt: Prompt) -> bool:
        """Return whether this is the prompt's first use in the message, and record the use."""
        count = len(self.prompts)
        return self.prompts.setdefault(id(prompt), count) == count

    def _cat(self, values: list[Tensor]) -> Any:
        name = _dtype_name(values[0])
        at, *_ = [self._put(bytes_of(value), 1 if i else ALIGNMENT) for i, value in enumerate(values)]
        return {"$": "cat", "dtype": name, "sizes": [value.numel() for value in values], "at": at}

    def _tensor(self, value: Tensor | Pieces) -> Any:
        name = _dtype_name(value)
        return {"$": "tensor", "dtype": name, "shape": list(value.shape), "at": self._put_tensor(value)}

    def _put_tensor(self, value: Tensor | Pieces) -> int:
        """Append a tensor's bytes to the payload; return their offset."""
        if isinstance(value, Tensor):
            return self._put(bytes_of(value))
        at = self._put(NOTHING)
        self.buffers += value.buffers
        self._at += value.numel() * value.dtype.itemsize
        return at

    def _columns(self, columns: Mapping[str, Tensor | Pieces]) -> Any:
        """Encode tensors by name, together if they are vectors of one length."""
        first = next(iter(columns.values()))
        if any(column.dim() != 1 or column.numel() != first.numel() for column in columns.values()):
            return {name: self._tensor(column) for name, column in columns.items()}
        parts = [(name, _dtype_name(column), self._put_tensor(column)) for name, column in columns.items()]
        return {"$": "columns", "count": first.numel(), "of": parts}

    def _put(self, data: memoryview, alignment: int = ALIGNMENT) -> int:
        """Append bytes to the payload at the alignment; return their offset."""
        if gap := -self._at % alignment:
            self.buffers.append(GAPS[gap])
            self._at += gap
        at = self._at
        if size := len(data):
            self.buffers.append(data)
            self._at = at + size
        return at


class _Reader:
    """A decoder of JSON trees and a payload."""

    def __init__(self, payload: bytearray) -> None:
        self.payload = payload
        self.prompts: list[Prompt] = []

    def value(self, tree: Any) -> Any:
        """Return the value that ``_Writer.tree`` encoded."""
        if type(tree) in PLAIN:
            return tree
        if type(tree) is list:
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
        if kind == "rows":
            return self._rows(tree["of"], tree["columns"])
        if kind == "columns":
            count = _index(tree["count"], 1 << 62)
            return {name: self._flat(dtype, count, at) for name, dtype, at in tree["of"]}
        if kind == "prompts":
            return self._column(tree)
        if kind in TEXTS:
            return TEXTS[kind][2](tree["text"])
        return self._dataclass(kind, tree["fields"])

    def _dataclass(self, kind: Any, fields: Any) -> Any:
        if kind not in CLASSES:
            raise DecodeError(f"No encoded value: '{kind:.40}' is no class that crosses between processes.")
        cls = CLASSES[kind]
        made = cls(**{name: self.value(entry) for name, entry in fields.items()})
        if cls is Prompt:
            self.prompts.append(made)
        return made

    def _rows(self, kind: Any, trees: list[Any]) -> list[Any]:
        cls = CLASSES.get(kind)
        if cls not in ROWS or len(trees) != len(FIELDS[cls]):
            raise DecodeError(f"No encoded value: rows of '{kind!s:.40}' with {len(trees)} columns.")
        count, columns = -1, list[Any]()
        for endless, tree in zip(ENDLESS[cls], trees, strict=True):
            if tree is None:
                columns.append(endless())
                continue
            plain = type(tree) is list and PLAIN.issuperset(map(type, tree))
            column = tree if plain else self._column(tree)
            if isinstance(column, list | tuple):
                if count not in (-1, len(column)):
                    raise DecodeError(
                        f"No encoded value: a field of '{kind}' has {len(column)} rows, not {count}."
                    )
                count = len(column)
            columns.append(column)
        if count < 0:
            raise DecodeError(f"No encoded value: nothing says how many rows of '{kind}' there are.")
        return list(map(cls, *columns))  # by position: by name takes 50% longer

    def _column(self, tree: Any) -> Sequence[Any] | Iterator[Any]:
        """Decode one field of all rows that is no list of plain values; an endless iterator if all rows are alike."""
        kind = tree.get("$") if isinstance(tree, dict) else None
        if kind == "cat":
            return self._cat(tree["dtype"], tree["sizes"], tree["at"])
        if kind == "prompts":
            self._new_prompts(tree["new"])
            return [self.prompts[at] for at in _indices(tree["at"], len(self.prompts))]
        if kind == "each":
            return itertools.repeat(tuple(self.value(tree["value"])))  # immutable, so rows can share it
        found = self.value(tree)
        if not isinstance(found, list):
            raise DecodeError("No encoded value: a field of rows is no list.")
        return found

    def _new_prompts(self, tree: Any) -> None:
        """Append the prompts that the message has not used before."""
        if tree is None:
            return
        if tree["$"] == "ids":
            if type(tree["of"]) is not list or not all(type(id) is str for id in tree["of"]):
                raise DecodeError("No encoded value: ids of prompts are no list of words.")
            self.prompts += [Prompt(id, [], "") for id in tree["of"]]
        elif tree["$"] == "texts":
            for at, size in tree["of"]:
                if type(self.value(json.loads(bytes(self._bytes(at, size))))) is not Prompt:
                    raise DecodeError("No encoded value: a prompt's text is none.")
        else:
            self.prompts += self._rows("Prompt", tree["columns"])

    def _cat(self, dtype: str, sizes: list[int], at: int) -> Sequence[Tensor]:
        whole = self._flat(dtype, sum(_indices(sizes, 1 << 62)), at)
        return whole.split_with_sizes(sizes)

    def _tensor(self, dtype: str, shape: list[int], at: int) -> Tensor:
        flat = self._flat(dtype, math.prod([_index(size, 1 << 62) for size in shape]), at)
        return flat if len(shape) == 1 else flat.reshape(shape)

    def _flat(self, dtype: str, count: int, at: int) -> Tensor:
        """Return COUNT values of the payload as a tensor [COUNT]."""
        found = DTYPES[dtype]
        if count == 0:
            return torch.empty(0, dtype=found)
        self._check(at, count * found.itemsize)
        return torch.frombuffer(self.payload, dtype=found, count=count, offset=at)

    def _bytes(self, at: int, size: int) -> memoryview:
        """Return a part of the payload."""
        self._check(at, size)
        return memoryview(self.payload)[at : at + size]

    def _check(self, at: int, size: int) -> None:
        """Raise ``DecodeError`` for bytes outside of the payload."""
        if _index(at, 1 << 62) + _index(size, 1 << 62) > len(self.payload):
            raise DecodeError(f"No encoded value: bytes {at} to {at + size} of {len(self.payload)}.")


def _parsed(text: str) -> Any:
    """Parse JSON as ``json.loads`` does; short texts take half the time."""
    try:
        tree, end = DECODER.raw_decode(text)
    except ValueError:
        end = -1
    return tree if end == len(text) else json.loads(text)


def _text(tree: Any) -> bytes:
    return AS_TEXT.encode(tree).encode()


def _all_are(values: Sequence[Any], default: Any) -> bool:
    """Return whether all values equal their field's default and have its type, as the first one has."""
    if len(set(map(type, values))) > 1 or values.count(default) < len(values):
        return False
    return type(default) is not float or bool(default) or "-0.0" not in map(repr, values)  # which equals 0.0


def _dtype_name(value: Tensor | Pieces) -> str:
    name = NAMES.get(value.dtype)
    if name is None:
        raise TypeError(
            f"Tensors of {str(value.dtype).removeprefix('torch.')} do not cross between processes."
        )
    return name


def bytes_of(value: Tensor) -> memoryview:
    """Return the bytes of a tensor [D_1, D_2, ...]: a CPU tensor's own if it is contiguous, otherwise a copy."""
    if not value.numel():
        return NOTHING
    if value.dtype is not torch.bfloat16 and value.is_cpu and not value.requires_grad:  # most of them
        found = value.numpy().data
        if found.c_contiguous:
            return found.cast("B")
    value = value.detach().cpu().contiguous().reshape(-1)
    return value.view(torch.uint8).numpy().data


def _indices(values: Any, end: int) -> list[int]:
    """Return a list of numbers of which each is valid by ``_index``; raise ``DecodeError`` otherwise."""
    if type(values) is not list or set(map(type, values)) - {int}:
        raise DecodeError("No encoded value: expected a list of numbers.")
    if values and not 0 <= min(values) <= max(values) < end:
        raise DecodeError(f"No encoded value: not all of {len(values)} numbers are from 0 to {end - 1}.")
    return values


def _index(value: Any, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise DecodeError(f"No encoded value: {value!r:.40} is no number from 0 to {end - 1}.")
    return value
