"""A merged tree becomes an ``EngineConfig``, or one error that lists everything wrong with it.

Core tables are checked by ``models.py``, option tables by the models of the specs that are handed
in; this module imports no plugin and no torch. Types are those of the TOML: ``"8"`` is no number.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from engine_core.config.checks import cross_problems, without_effect
from engine_core.config.choices import Chosen, Place, bare, keys_of, model_in, model_of, places, prepared
from engine_core.config.models import EngineConfig
from engine_core.config.read import Path_, RawConfig, key_text
from engine_core.config.wording import Problem, in_order, type_problems, unknown_keys
from engine_core.errors import ConfigError, did_you_mean
from engine_core.specs import Spec

SpecOf = Callable[[str, str], Spec | None]


def validate(
    raw: RawConfig,
    spec_of: SpecOf,
    known: Callable[[str], Collection[str]],
    context: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Check everything and fill ``options`` in.

    Args:
        raw: from ``read_config``.
        spec_of: kind and name of a chosen thing -> its spec; None leaves its table unjudged.
        known: kind -> the names that are installed; a table of one of them may stand unread.
        context: for validators of option models (``info.context``): ``folder``, ``allow_code``.

    Returns:
        The config; ``_source`` is ``raw`` with ``unread`` filled in.

    Raises:
        ConfigError: every problem, with file and line.
    """
    return _Validation(raw, spec_of, known, context).run()


class _Validation:
    def __init__(
        self,
        raw: RawConfig,
        spec_of: SpecOf,
        known: Callable[[str], Collection[str]],
        context: Mapping[str, Any] | None,
    ) -> None:
        self.raw, self.spec_of, self.known = raw, spec_of, known
        self.context = dict(context or {})
        self.problems: list[Problem] = []
        self.unread: list[str] = []
        self.options: dict[tuple[Path_, Chosen], BaseModel] = {}
        self.models: dict[Path_, type[BaseModel]] = dict(_core_tables())  # tables by path, for hints

    def run(self) -> EngineConfig:
        data = prepared(self.raw.data)
        sections = None
        for chosen in next(places(data)).chosen:
            sections = getattr(self.spec_of(chosen.kind, chosen.name), "sections", None) or None
            core = set(data) & set(EngineConfig.model_fields) - {"trainer"}
            for name in sorted(core - set(sections or core)):
                self.unread.append(f"[{name}]: trainer '{chosen.name}' does not read it")
        for place in list(places(data)):
            self.take_options(place, sections is None or place.section in ("", *sections))
        config = self.core(data)
        if config is not None:
            self.problems += cross_problems(config, sections or frozenset(EngineConfig.model_fields))
        if self.problems or config is None:
            raise ConfigError(in_order(self.problems, self.raw))
        self.unread += [f"{key}: {why}" for key, why in without_effect(config) if key in self.raw.origins]
        config._source = dataclasses.replace(self.raw, unread=self.unread)
        return config

    def take_options(self, place: Place, read: bool) -> None:
        """Take the option tables out of a core table and validate those of the chosen names."""
        model, chosen = model_of(place.section), {c.table for c in place.chosen if read}
        tables: dict[str, Any] = {}
        for key in [key for key in place.table if key not in keys_of(model)]:
            if key in chosen:
                tables[key] = place.table.pop(key)
            elif any(key in self.known(kind) for kind in place.kinds) and isinstance(place.table[key], dict):
                del place.table[key]
                names = ", ".join(f"'{c.name}'" for c in place.chosen) or "none"
                self.unread.append(f"[{key_text(_header(place, key))}]: the run uses {names}")
            elif key in model.model_fields:  # filled in by the loader, unknown to a file
                self.unknown((*place.path, key), model, place)
                del place.table[key]
        if read:
            for name in sorted(chosen):
                self.validate_options(place, name, tables.get(name, {}))

    def validate_options(self, place: Place, table: str, data: Any) -> None:
        """One table; where an advantage and a loss share its name, each takes the keys that it has."""
        found = [(c, self.spec_of(c.kind, c.name)) for c in place.chosen if c.table == table]
        users = [(chosen, spec) for chosen, spec in found if spec is not None]
        path = (*place.path, table)
        for number, (chosen, spec) in enumerate(users):
            mine, own = data, set(spec.config.model_fields)
            if isinstance(data, dict) and len(users) > 1:  # unknown keys are told by the first
                foreign = {key for _, other in users for key in other.config.model_fields} - own
                mine = {k: v for k, v in data.items() if (k in own if number else k not in foreign)}
            owner = f" Table of {spec.noun} '{table}'; see: engine schema {key_text(_header(place, table))}"
            self.models[_header(place, table)] = spec.config
            done = self.check(spec.config, mine, path, owner)
            if done is not None:
                self.options[place.path, chosen] = done

    def check(self, model: type[BaseModel], data: Any, path: Path_, owner: str) -> BaseModel | None:
        try:
            text = json.dumps(data, default=str)
            return model.model_validate_json(text, strict=True, context=self.context)
        except ValidationError as error:
            self.problems += type_problems(error, path, data, self.raw, owner)
            for inner in unknown_keys(error, data):
                self.unknown(path + inner, _model_at(model, inner[:-1]), None, owner)
        return None

    def core(self, data: dict[str, Any]) -> EngineConfig | None:
        """The core's tables, option tables already taken out."""
        by_path = {place.path: place for place in places(data)}
        try:
            config = EngineConfig.model_validate_json(json.dumps(data, default=str), strict=True)
        except ValidationError as error:
            for problem in type_problems(error, (), data, self.raw, ""):
                self.problems.append(Problem(problem.path, problem.text + _core_owner(problem.path)))
            for path in unknown_keys(error, data):
                self.unknown(path, _model_at(EngineConfig, _core_header(path[:-1])), by_path.get(path[:-1]))
            return None
        self.attach(config, data)
        return config

    def attach(self, config: EngineConfig, data: dict[str, Any]) -> None:
        """Put validated option tables where the engines look for them."""
        for (path, chosen), options in self.options.items():
            holder: Any = config
            for part in path:
                by_name = {entry.name: entry for entry in holder} if isinstance(holder, list) else {}
                holder = by_name[part] if by_name else getattr(holder, part)
            if chosen.kind == "trackers":
                holder.options = {**holder.options, chosen.name: options}
            else:
                setattr(holder, chosen.field, options)
        ref, actor = config.ref, config.actor
        if ref and ref.backend == actor.backend and bare(ref.backend) not in self.raw.data["ref"]:
            ref.options = actor.options

    def unknown(
        self, path: Path_, model: type[BaseModel] | None, place: Place | None, owner: str | None = None
    ) -> None:
        """An unknown key: the nearest known one, the tables that do have it, who owns this one."""
        key = path[-1]
        names = set(keys_of(model)) if model else set()
        if place is not None and isinstance(place.table.get(key), dict):
            names |= {name for kind in place.kinds for name in self.known(kind)}
        nearest = did_you_mean(key, names)
        homes = [f"[{key_text(t)}]" for t, other in self.models.items() if t and key in keys_of(other)]
        elsewhere = f" '{key}' is a key of {' and of '.join(homes[:3])}." if homes else ""
        self.problems.append(Problem(path, f"unknown key.{nearest}{elsewhere}{owner or _core_owner(path)}"))


def _header(place: Place, table: str) -> Path_:
    """As the file writes it: ``[reward.format]``, whichever reward it belongs to."""
    return (place.section, table) if place.section else (table,)


def _core_header(path: Path_) -> Path_:
    """The same for a core table: the name of an array's element left out."""
    return (path[0], *path[2:]) if path and path[0] in ("reward", "stage") else path


def _core_owner(path: Path_) -> str:
    """The end of a message about a key of the core."""
    table = key_text(_core_header(path[:-1]))
    return f" Table of the core; see: engine schema {table}" if table else " See: engine schema"


def _core_tables() -> Iterator[tuple[Path_, type[BaseModel]]]:
    pending: list[tuple[Path_, type[BaseModel]]] = [((), EngineConfig)]
    while pending:
        path, model = pending.pop(0)
        yield path, model
        for name in keys_of(model):
            inner = model_in(model.model_fields[name].annotation)
            if inner is not None:
                pending.append(((*path, name), inner))


def _model_at(model: type[BaseModel], path: Path_) -> type[BaseModel] | None:
    """The model of the table at ``path`` below ``model``."""
    for part in path:
        info = model.model_fields.get(part)
        inner = model_in(info.annotation) if info else None
        if inner is None:
            return None
        model = inner
    return model
