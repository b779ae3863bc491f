"""Settings that change by step, from ``[schedule]``.

    [schedule]
    "rollout.temperature" = [[0, 1.0], [100, 0.7]]      # 1.0 from the start, 0.7 from step 100 on

Steps count from 1; an entry at 0 or 1 holds from the start. Before its first entry a setting has
its ordinary value. Left out on purpose: interpolation between entries, and settings that a running
engine cannot change (names, shapes, paths).
"""

from __future__ import annotations

import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from engine_core.config.choices import bare, keys_of
from engine_core.config.read import RawConfig
from engine_core.config.wording import sentence
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
    return {key: kind for key, (_, kind) in _places(config).items()}


def setting(config: EngineConfig, key: str) -> Any:
    """Return the value of a key that can be scheduled."""
    return _inside(config, _places(config)[key][0])


def with_setting(config: EngineConfig, key: str, value: float | bool) -> EngineConfig:
    """Return a copy with one setting changed; everything else is shared with ``config``.

    Raises:
        ConfigError: the value is not valid for this setting.
    """
    path, kind = _places(config)[key]
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return _replaced(config, path, value)
    except ValidationError as error:
        raise ConfigError(sentence(value, (key,), error.errors(), RawConfig({}))) from None


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


def _places(config: EngineConfig) -> dict[str, tuple[Path_, type]]:
    """Return the settings: their keys, each with the path of its field in the config and its type."""
    algorithm = config.algorithm
    tables: dict[str, Path_] = {
        "algorithm": ("algorithm",),
        "algorithm.correction": ("algorithm", "correction"),
    }
    tables[f"algorithm.{bare(algorithm.loss)}"] = ("algorithm", "loss_options")
    tables[bare(config.trainer)] = ("options",)
    paths: dict[str, Path_] = {key: tuple(key.split(".")) for key in FIXED_SETTINGS}
    # last, because of a shared table the advantage has keys first
    of_advantage = (f"algorithm.{bare(algorithm.advantage)}", ("algorithm", "advantage_options"))
    for table, path in (*tables.items(), of_advantage):
        if (holder := _inside(config, path)) is not None:
            paths |= {f"{table}.{field}": (*path, field) for field in keys_of(type(holder))}
    found: dict[str, tuple[Path_, type]] = {}
    for key, path in paths.items():
        if (holder := _inside(config, path[:-1])) is not None:
            kind = _number(type(holder).model_fields[path[-1]].annotation)
            if kind is not None and (path[0] != "options" or kind is float):
                found[key] = path, kind
    return found


def _inside(model: Any, path: Sequence[str]) -> Any:
    """Return what a path of field names leads to; None if one of its tables is absent."""
    for field in path:
        model = None if model is None else getattr(model, field)
    return model


def _replaced(model: Any, path: Path_, value: Any) -> Any:
    name, *rest = path
    if rest:
        return model.model_copy(update={name: _replaced(getattr(model, name), tuple(rest), value)})
    checked = type(model).model_validate({**dict(model), name: value}, strict=True)
    return model.model_copy(update={name: getattr(checked, name)})


def _number(annotation: Any) -> type | None:
    """bool, int or float where the annotation is one of them, also annotated or optional."""
    if annotation in (bool, int, float):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return next((kind for arg in typing.get_args(annotation) if (kind := _number(arg))), None)
    return None
