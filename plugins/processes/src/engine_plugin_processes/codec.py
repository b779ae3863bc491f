"""The encoding of messages between controller and workers: MessagePack by ``msgspec``, and raw bytes. No pickle.

The set of types is closed: plain values, tensors, paths, and the dataclasses of ``CROSSING``. The sender refuses any
other value. The receiver makes no other object, whatever the bytes are: ``msgspec`` checks each field against its type.

In the header everything that is not plain is an extension, whose code says what it is. A tensor is a reference to the
payload: dtype, offset, shape. Requests and rollouts cross in lists: the prompts of requests once each, and of a
rollout's prompt only the id, since the controller has the prompt.

A tuple outside of these dataclasses arrives as a list, and dates and decimals in a row's columns arrive as text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import msgpack
from msgspec.msgpack import Decoder, Ext
from torch import Tensor

from engine_core import types
from engine_core.contracts.engines import Layout
from engine_core.contracts.weight_sync import SyncResult
from engine_core.errors import DataError
from engine_core.types import Batch, LossCall, Prompt, Request, Rollout, StepOutput, TrainOutput

# msgspec evaluates annotations in the module of a dataclass, and the core imports torch for type checkers alone
setattr(types, "Tensor", Tensor)  # noqa: B010

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
ALIGNMENT = 16  # of a tensor's bytes in the payload
GAPS = tuple(memoryview(bytes(size)) for size in range(ALIGNMENT))


class DecodeError(ValueError):
    """An error: the bytes were not written by ``encode``."""


class Requests(msgspec.Struct, array_like=True):
    """A list of requests, whose prompts are numbers in ``prompts``."""

    prompts: list[Prompt]  #: each prompt once
    at: list[int]  #: number of the prompt of each request
    requests: list[Request]  #: with empty prompts

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Requests:
        """Return requests without their prompts, and each prompt once."""
        prompts = {id(request.prompt): request.prompt for request in requests}
        numbers = {key: number for number, key in enumerate(prompts)}
        without = [
            Request(
                one.id, EMPTY, one.sampling, one.group_id, one.index, one.begun and _without_prompt(one.begun)
            )
            for one in requests
        ]
        return cls(list(prompts.values()), [numbers[id(request.prompt)] for request in requests], without)

    def whole(self) -> list[Request]:
        """Return the requests with their prompts.

        Raises:
            IndexError, ValueError: the numbers do not fit.
        """
        for number, request in zip(self.at, self.requests, strict=True):
            request.prompt = self.prompts[number]
            if request.begun is not None:
                request.begun.prompt = request.prompt
        return self.requests


EMPTY = Prompt("", [], "")
CROSSING: Mapping[type, Any] = {
    **{cls: cls for cls in (Batch, LossCall, StepOutput, TrainOutput, Layout, SyncResult)},
    Request: Requests,
    Rollout: list[Rollout],
}
"""The dataclasses that cross, and the type in which a value or a list of them is sent."""
CODES = {cls: code for code, cls in enumerate(CROSSING, 16)}
DECODED = dict(zip(CODES.values(), CROSSING.values(), strict=True))
TENSOR, PATH = 1, 2
TENSOR_DECODER = Decoder(tuple[str, int, list[int]])


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is ready to be sent any number of times."""

    header: bytes  #: the value, with places of the buffers
    buffers: list[memoryview]  #: the payload, in order

    @property
    def payload_bytes(self) -> int:
        """The length of the payload in bytes."""
        return sum(len(buffer) for buffer in self.buffers)


def encode(value: Any) -> Encoded:
    """Encode a value; the bytes of CPU tensors are not copied.

    Raises:
        TypeError: a part of the value is not of the closed set.
        DataError: a column of a prompt holds an integer of more than 64 bits or broken Unicode.
    """
    writer = _Writer()
    return Encoded(writer.encode(writer.marked(value)), writer.buffers)


def decode(header: bytes, payload: bytearray) -> Any:
    """Decode a value; its tensors share the memory of ``payload``.

    Raises:
        DecodeError: the bytes are no encoded value.
    """
    try:
        return Decoder(ext_hook=partial(_extension, payload)).decode(header)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError, RuntimeError) as error:
        raise DecodeError(f"No encoded value: {type(error).__name__}: {error}") from error


def _extension(payload: bytearray, code: int, data: memoryview) -> Any:
    """Return the value of an extension of the header."""
    if code == TENSOR:
        name, at, shape = TENSOR_DECODER.decode(data)
        dtype, count = DTYPES[name], math.prod(shape)
        if count < 1:
            return torch.empty(shape, dtype=dtype)  # raises for a negative size
        flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=at)
        return flat if len(shape) == 1 else flat.reshape(shape)
    if code == PATH:
        return Path(str(data, "utf-8"))
    found = Decoder(DECODED[code], ext_hook=partial(_extension, payload)).decode(data)
    return found.whole() if isinstance(found, Requests) else found


class _Writer:
    """An encoder of values into a header and the buffers of a payload."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._at = 0

    def encode(self, value: Any) -> bytes:
        """Return MessagePack. No encoder with this hook is kept: the cycle would hold the buffers until a collection."""
        return msgpack.encode(value, enc_hook=self._other)

    def marked(self, value: Any) -> Any:
        """Return ``value`` with an extension in place of each dataclass and of each list of requests or rollouts."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, Mapping):
            return {key: self.marked(entry) for key, entry in value.items()}
        if kind in (list, tuple):
            kinds = set(map(type, value))
            if kinds <= PLAIN:
                return value
            if kinds == {Request}:
                return self._requests(value)
            if kinds == {Rollout}:
                return self._extension(Rollout, [_without_prompt(rollout) for rollout in value])
            return [self.marked(entry) for entry in value]
        if kind in CODES:
            return self._extension(kind, value)
        return self._other(value) if dataclasses.is_dataclass(value) else value

    def _requests(self, requests: Sequence[Request]) -> Ext:
        sent = Requests.of(requests)
        try:
            return self._extension(Request, sent)
        except (OverflowError, UnicodeEncodeError) as error:
            for prompt in sent.prompts:
                try:
                    self.encode(prompt)
                except (OverflowError, UnicodeEncodeError):
                    raise DataError(
                        f"Prompt '{prompt.id}' cannot be sent to another process ({error}): a column holds an integer of "
                        "more than 64 bits or broken Unicode. Store the integer as text."
                    ) from error
            raise

    def _extension(self, kind: Any, value: Any) -> Ext:
        return Ext(CODES[kind], self.encode(value))

    def _other(self, value: Any) -> Any:
        """Return what stands for a value that MessagePack does not know; its errors end ``encode``."""
        if isinstance(value, Tensor):
            if (name := NAMES.get(value.dtype)) is None:
                raise TypeError(f"Tensors of {value.dtype} do not cross between processes.")
            if gap := -self._at % ALIGNMENT:
                self.buffers.append(GAPS[gap])
                self._at += gap
            data = bytes_of(value)
            at, self._at = self._at, self._at + len(data)
            self.buffers.append(data)
            return Ext(TENSOR, msgpack.encode((name, at, tuple(value.shape))))
        if isinstance(value, Path):
            return Ext(PATH, str(value).encode())
        for plain in (int, float, str):  # subclasses, such as numbers of numpy
            if isinstance(value, plain):
                return plain(value)
        raise TypeError(
            f"A {type(value).__module__}.{type(value).__qualname__} does not cross between processes. Plain values, tensors, "
            f"lists of requests or rollouts, and {', '.join(cls.__name__ for cls in CROSSING)} do."
        )


def bytes_of(value: Tensor) -> memoryview:
    """Return the bytes of a tensor [D_1, D_2, ...]: a CPU tensor's own if it is contiguous, otherwise a copy."""
    if not value.numel():
        return memoryview(b"")
    if value.dtype is not torch.bfloat16 and value.is_cpu and not value.requires_grad:  # most of them
        found = value.numpy().data
        if found.c_contiguous:
            return found.cast("B")
    value = value.detach().cpu().contiguous().reshape(-1)
    return value.view(torch.uint8).numpy().data


def _without_prompt(rollout: Rollout) -> Rollout:
    """Return a copy of a rollout whose prompt has only its id."""
    return dataclasses.replace(rollout, prompt=Prompt(rollout.prompt.id, [], ""))
