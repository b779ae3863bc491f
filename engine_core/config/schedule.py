"""Settings that change by step, from ``[schedule]``.

    [schedule]
    "rollout.temperature" = [[0, 1.0], [100, 0.7]]      # 1.0 from the start, 0.7 from step 100 on

Steps count from 1; an entry at 0 or 1 holds from the start. Before its first entry a setting has
its ordinary value. Left out on purpose: interpolation between entries, and settings that a running
engine cannot change (names, shapes, paths).
"""

from __future__ import annotations

import functools
import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from engine_core.config.choices import bare, keys_of
from engine_core.errors import ConfigError, did_you_mean
from engine_core.tables import DEFAULTS

if typing.TYPE_CHECKING:
    from engine_core.config.models import EngineConfig
    from engine_core.config.read import Path_

FIXED_SETTINGS = (
    *(f"rollout.{option}" for option in DEFAULTS),
    "actor.optim.lr",
    "actor.max_tokens_per_rank",
    "critic.optim.lr",
    "critic.max_tokens_per_rank",
)
"""Numbers of these are settings, besides every number and switch of ``[algorithm]`` and its option tables, and every number that is no count of
the trainer's own table (``dpo.beta``): what that table switches or counts is built at the start."""

_WORDS: dict[type | None, str] = {bool: "true or false", int: "a whole number", float: "a number"}


def config_at(config: EngineConfig, step: int) -> EngineConfig:
    """Return the config during ``step`` (from 1); ``config`` itself if nothing is scheduled."""
    for key, entries in config.schedule.items():
        if held := [value for start, value in entries if start <= max(step, 1)]:
            config = with_setting(config, key, held[-1])
    return config


def changes(config: EngineConfig, step: int) -> dict[str, Any]:
    """Return the settings that have another value than in the step before; in step 1, than in the file."""
    now, before = config_at(config, step), config_at(config, step - 1) if step > 1 else config
    return {key: setting(now, key) for key in config.schedule if setting(now, key) != setting(before, key)}


def boundaries(config: EngineConfig) -> list[int]:
    """Return the first step and every step in which a scheduled setting may change."""
    return sorted({1} | {max(1, start) for entries in config.schedule.values() for start, _ in entries})


def settings(config: EngineConfig) -> dict[str, type]:
    """Every key that can be scheduled, with its type: bool, int or float."""
    fixed = [key for key in FIXED_SETTINGS if getattr(config, key.partition(".")[0]) is not None]
    kinds = {key: _kind(config, key) for key in (*fixed, *_algorithm_keys(config))}
    of_trainer = {key: _kind(config, key) for key in _trainer_keys(config)}
    kinds |= {key: kind for key, kind in of_trainer.items() if kind is float}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def setting(config: EngineConfig, key: str) -> Any:
    """Return the value of a key that can be scheduled."""
    *tables, field = _path(config, key)
    return getattr(_inside(config, tables), field)


def with_setting(config: EngineConfig, key: str, value: float | bool) -> EngineConfig:
    """Return a copy with one setting changed; everything else is shared with ``config``.

    Raises:
        ConfigError: the value is not valid for this setting.
    """
    kind = _kind(config, key)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not kind and (kind, type(value)) != (float, int):
        raise ConfigError(f"got {str(value).lower()}, expected {_WORDS[kind]}.")
    try:
        return _replaced(config, _path(config, key), value)
    except ValidationError as error:
        if own := [
            e["msg"].removeprefix("Value error, ") for e in error.errors() if e["type"] == "value_error"
        ]:
            raise ConfigError(f"got {value}: {own[0]}") from None
        expected = " and ".join(e["msg"].removeprefix("Input should be ") for e in error.errors())
        raise ConfigError(f"got {value}, expected a value {expected}.") from None


def schedule_problems(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Key and message of every entry that cannot be followed."""
    known = settings(config)
    for key, entries in config.schedule.items():
        if key not in known:
            yield key, f"this cannot change during a run.{did_you_mean(key, known)}"
            continue
        starts = [start for start, _ in entries]
        if not entries or any(later <= earlier for earlier, later in itertools.pairwise(starts)):
            yield key, f"got the steps {starts}, expected at least one entry [step, value], steps increasing."
        for start, value in entries:
            try:
                with_setting(config, key, value)
            except ConfigError as error:
                yield key, f"from step {start} on: {error}"


def _algorithm_keys(config: EngineConfig) -> Iterator[str]:
    algorithm = config.algorithm
    yield from (f"algorithm.{key}" for key in keys_of(type(algorithm)))
    yield from (f"algorithm.correction.{key}" for key in keys_of(type(algorithm.correction)))
    tables = ((algorithm.advantage, algorithm.advantage_options), (algorithm.loss, algorithm.loss_options))
    for name, options in tables:
        if options is not None:
            yield from (f"algorithm.{bare(name)}.{key}" for key in type(options).model_fields)


def _trainer_keys(config: EngineConfig) -> Iterator[str]:
    if config.options is not None:
        yield from (f"{bare(config.trainer)}.{key}" for key in type(config.options).model_fields)


def _path(config: EngineConfig, key: str) -> Path_:
    """Field names from the config to the setting; the name of an option table becomes its field."""
    *parents, field = key.split(".")
    if parents == [bare(config.trainer)] and config.options is not None:
        parents = ["options"]
    if len(parents) == 2 and parents[0] == "algorithm" and parents[1] != "correction":
        options = config.algorithm.advantage_options
        mine = parents[1] == bare(config.algorithm.advantage) and options is not None
        first = mine and field in type(options).model_fields
        parents[1] = "advantage_options" if first else "loss_options"
    return (*parents, field)


def _inside(model: Any, tables: Sequence[str]) -> Any:
    return functools.reduce(getattr, tables, model)


def _kind(config: EngineConfig, key: str) -> type | None:
    *tables, field = _path(config, key)
    return _number(type(_inside(config, tables)).model_fields[field].annotation)


def _replaced(model: Any, path: Path_, value: Any) -> Any:
    name, *rest = path
    if not rest:
        return type(model).model_validate({**dict(model), name: value})
    return model.model_copy(update={name: _replaced(getattr(model, name), tuple(rest), value)})


def _number(annotation: Any) -> type | None:
    """bool, int or float where the annotation is one of them, also annotated or optional."""
    if annotation in (bool, int, float):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return next((kind for arg in typing.get_args(annotation) if (kind := _number(arg))), None)
    return None
