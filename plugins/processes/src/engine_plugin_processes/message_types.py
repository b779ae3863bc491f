"""The closed set of types that may cross between controller and workers, which ``codec`` writes and reads."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from engine_core.contracts.engines import Layout
from engine_core.contracts.weight_sync import SyncResult
from engine_core.types import Batch, LossCall, Prompt, Request, Rollout, Sampling, StepOutput, TrainOutput

CLASSES: Mapping[str, type] = {
    cls.__name__: cls
    for cls in (
        *(Batch, LossCall, Prompt, Request, Rollout, Sampling, StepOutput, TrainOutput),
        *(Layout, SyncResult),
    )
}
"""The dataclasses that cross."""
FIELDS: Mapping[type, tuple[str, ...]] = {
    cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in CLASSES.values()
}

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
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
ROWS = frozenset({Prompt, Request, Rollout, Sampling})
"""Dataclasses whose lists are sent field by field."""


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, or ``MISSING``."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _endless(field: dataclasses.Field[Any]) -> Callable[[], Iterator[Any]]:
    """Return a factory of endless iterators over a field's default."""
    if field.default is not dataclasses.MISSING:
        return lambda: itertools.repeat(field.default)  # of an immutable type
    make, end = field.default_factory, object()
    if make is dataclasses.MISSING:
        return functools.partial(_none_for, field.name)
    return lambda: iter(make, end)  # one for each row


def _none_for(name: str) -> Iterator[Any]:
    raise TypeError(f"'{name}' has no default")


DEFAULTS: Mapping[type, tuple[Any, ...]] = {
    cls: tuple(map(_default, dataclasses.fields(cls))) for cls in ROWS
}
"""The default of each field, to compare with; ``dataclasses.MISSING``: it has none."""
ENDLESS: Mapping[type, tuple[Callable[[], Iterator[Any]], ...]] = {
    cls: tuple(map(_endless, dataclasses.fields(cls))) for cls in ROWS
}
"""What gives the default of each field to any number of rows; a ``TypeError`` where it has none."""
FIELDS_OF = {cls: operator.attrgetter(*FIELDS[cls]) for cls in ROWS}  # reads all of one, in their order
