"""The keys of a run file that choose a plugin by name, and the tables of the chosen plugins' options.

An option table is in the same table as the choosing key, under the plugin's bare name: ``backend = "torch"``
and ``[actor.torch]``. ``"dist:torch"`` has the same option table.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from engine_core.config.models import EngineConfig
from engine_core.config.rewards import MODELS

# section -> its choices: (key, kind of name, field of the model that holds the options); "reward.model" means the
# table `model` in each element of the array `reward`, "eval.set" each element of the array `set` in the table `eval`
CHOICES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "": (("trainer", "trainers", "options"),),
    "actor": (("backend", "train_engines", "options"),),
    "ref": (("backend", "train_engines", "options"),),
    "critic": (("backend", "train_engines", "options"),),
    "teacher": (("backend", "train_engines", "options"),),
    "rollout": (
        ("backend", "rollout_engines", "options"),
        ("transport", "weight_transports", "transport_options"),
    ),
    "reward": (("name", "rewards", "options"),),
    "reward.model": (("backend", "train_engines", "options"),),
    "reward.judge": (("backend", "rollout_engines", "options"),),
    "reward.verdict": (("backend", "train_engines", "options"),),
    "environment": (
        ("name", "environments", "options"),
        ("tool_format", "tool_formats", "tool_format_options"),
    ),
    "stage": (("name", "stages", "options"),),
    "algorithm": (("advantage", "advantages", "advantage_options"), ("loss", "losses", "loss_options")),
    "data": (("source", "data_sources", "options"), ("curriculum", "curricula", "curriculum_options")),
    "eval.set": (("source", "data_sources", "options"),),
    "tracking": (("trackers", "trackers", "options"),),
    "runtime": (("backend", "runtimes", "options"),),
}

AUTO = {"weight_transports": "auto", "data_sources": "", "curricula": "", "tool_formats": "auto"}
"""Kinds for which a run may choose no plugin, and the value that means this. The value is not a name."""

LIKE_ACTOR = ("backend", "max_tokens_per_rank")
"""Keys that ``[ref]``, ``[critic]`` and ``[teacher]`` take from ``[actor]`` if they do not set them."""

OPTIONAL_ROLES = ("ref", "critic", "teacher")
"""Tables of optional models besides the actor. An absent table chooses no plugin."""

OPTIONAL = (*OPTIONAL_ROLES, "environment")
"""Optional tables. An absent table chooses no plugin."""


@dataclass(frozen=True)
class Chosen:
    """A plugin name that a run chose."""

    key: str  # the choosing key
    kind: str
    name: str  # as written, perhaps "dist:name"
    field: str  # field of the section's model that holds the options

    @property
    def table(self) -> str:
        """Name of the plugin's option table; of a file its name without ``.py``."""
        return Path(self.name).stem if self.name.endswith(".py") else bare(self.name)


@dataclass(frozen=True)
class ChoiceTable:
    """A table of a run file that chooses plugins."""

    section: str  # key of CHOICES; "" is the top level
    path: tuple[str, ...]  # ("reward", "math")
    table: dict[str, Any]
    chosen: tuple[Chosen, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of names whose option tables may be in this table."""
        return tuple(kind for _, kind, _ in CHOICES.get(self.section, ()))

    def in_any(self, sections: Collection[str]) -> bool:
        """Return whether this table is the top level, or in one of these top-level tables."""
        return self.section.partition(".")[0] in ("", *sections)


def bare(name: str) -> str:
    """Return a name without its distribution: ``"name"`` for ``"dist:name"``."""
    return name.rpartition(":")[2]


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in ``M``, ``M | None`` or ``list[M]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in typing.get_args(annotation) if (model := model_in(arg))), None)


def model_of(section: str) -> type[BaseModel]:
    """Return the model of a section of ``CHOICES``."""
    model: type[BaseModel] = EngineConfig
    for key in filter(None, section.split(".")):
        inner = model_in(model.model_fields[key].annotation)
        assert inner is not None
        model = inner
    return model


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys that a file may set, without those that the loader fills in."""
    return [name for name, info in model.model_fields.items() if not info.exclude]


def prepared(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tree with the ``LIKE_ACTOR`` keys filled in and ``[schedule]`` flattened."""
    tree = copy.deepcopy(dict(data))
    actor = tree.get("actor")
    for role in (tree.get(name) for name in OPTIONAL_ROLES):
        if isinstance(role, dict) and isinstance(actor, dict):
            for key in LIKE_ACTOR:
                if key in actor:
                    role.setdefault(key, actor[key])
    if isinstance(tree.get("schedule"), dict):
        tree["schedule"] = dict(_flat(tree["schedule"]))
    return tree


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def places(data: dict[str, Any]) -> Iterator[ChoiceTable]:
    """Yield each table of ``data`` that chooses plugins. A value of another type than table is left out."""
    for section in CHOICES:
        top, _, inner = section.partition(".")
        node = data if not section else data.get(top, None if section in OPTIONAL else {})
        array: tuple[str, ...] = (top,)
        if inner and isinstance(node, dict):  # an array in a table
            array, node, inner = (top, inner), node.get(inner), ""
        if isinstance(node, list):
            for number, element in enumerate(node):
                if isinstance(element, dict):
                    name = element.get("name")
                    path = (*array, name if isinstance(name, str) else str(number))
                    table = element.get(inner) if inner else element
                    if isinstance(table, dict):
                        yield _place(section, (*path, inner) if inner else path, table)
        elif isinstance(node, dict) and "." not in section:
            yield _place(section, (section,) if section else (), node)
    entries, tables = data.get("plugins", []), data.get("plugin", {})
    if isinstance(entries, list) and isinstance(tables, dict):
        chosen = [
            Chosen("plugins", "plugins", entry, "options") for entry in entries if isinstance(entry, str)
        ]
        yield ChoiceTable("plugin", ("plugin",), tables, tuple(chosen))


def _place(section: str, path: tuple[str, ...], table: dict[str, Any]) -> ChoiceTable:
    chosen = []
    own = section == "reward" and any(kind in table for kind in MODELS)  # its name is not a plugin's
    for key, kind, field in () if own else CHOICES[section]:
        value = table.get(key, model_of(section).model_fields[key].default)
        names = value if isinstance(value, list) else [value]
        names = [name for name in names if isinstance(name, str) and name != AUTO.get(kind)]
        chosen += [Chosen(key, kind, name, field) for name in names]
    parts = table.get("mix") if section == "data" else None
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and isinstance(name := part.get("source"), str) and name:
            chosen.append(Chosen("mix", "data_sources", name, "options"))
    return ChoiceTable(section, path, table, tuple(chosen))


def holder_of(config: EngineConfig, path: tuple[str, ...]) -> Any:
    """Return the config object of the table at ``ChoiceTable.path``."""
    holder: Any = config
    for part in path:
        is_array = isinstance(holder, list)
        holder = next(entry for entry in holder if entry.name == part) if is_array else getattr(holder, part)
    return holder


def used_names(data: Mapping[str, Any], sections: Collection[str] | None = None) -> dict[str, set[str]]:
    """Return the plugin names that a run uses, by kind.

    Args:
        data: the tree of ``RawConfig.data``.
        sections: top-level tables that the trainer reads; default: all.
    """
    names: dict[str, set[str]] = {}
    for place in places(prepared(data)):
        # those of `plugins` are not chosen from a table
        if place.section != "plugin" and (sections is None or place.in_any(sections)):
            for chosen in place.chosen:
                names.setdefault(chosen.kind, set()).add(chosen.name)
    return names
