"""The pages of ``docs/reference/config``: every table of a run file with its keys."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from page_parts import page, plain, table

from engine_core.plugins.metadata import Offer, installed
from engine_core.plugins.modules import spec_class
from engine_plugin_tools.commands.schema import installed_specs
from engine_plugin_tools.schema import NO_NAME, is_table, json_schema, schema_at, type_text

if TYPE_CHECKING:
    from engine_core.specs import Spec

ROOT = Path(__file__).parent.parent
Table = dict[str, Any]


def project_files() -> list[Path]:
    """Return the ``pyproject.toml`` of the core, then those of the plugins in this repository."""
    return [ROOT / "pyproject.toml", *sorted((ROOT / "plugins").glob("[a-z]*/pyproject.toml"))]


def our_offers() -> dict[tuple[str, str], Offer]:
    """Return every name of the core and of the plugins in this repository, by kind and name; others may be installed too."""
    ours = {tomllib.loads(file.read_text("utf-8"))["project"]["name"] for file in project_files()}
    return {(offer.kind, offer.name): offer for offer in installed() if offer.distribution.name in ours}


def our_specs() -> dict[str, dict[str, Spec]]:
    """Return the spec of each of our names by kind: the core's tables first, then those that a plugin defines.

    None of ours is a plugin of ``plugins = [...]``.
    """
    names = our_offers()
    return {
        kind: {name: spec for name, spec in specs.items() if (kind, name) in names}
        for kind, specs in installed_specs().items()
        if kind != "plugins"
    }


CONFIG_PAGES = {
    "models": ("Config: models, optimizers, LoRA", ["model", "actor", "ref", "critic", "teacher"]),
    "train_engines": ("Config: train engines", []),
    "sampling": ("Config: sampling, weights, environments", ["rollout", "environment"]),
    "rewards": ("Config: rewards, reward models, judges", ["reward"]),
    "algorithm": ("Config: algorithm and stages", ["algorithm", "stage"]),
    "trainers": ("Config: SFT, preferences, distillation, offline and asynchronous RL", []),
    "data": ("Config: data and evaluation", ["data", "eval"]),
    "run": ("Config: run, checkpoints, tracking, profile", ["run", "checkpoint", "tracking", "profile"]),
    "runtime": ("Config: processes and placement", ["runtime", "placement"]),
}
"""Title of each page of ``reference/config/``, and the top-level tables on it."""


def config_tables() -> tuple[Table, dict[str, list[str]]]:
    """Return the schema of a run file with our plugins, and the paths of its tables by page, in the order of the file."""
    specs = our_specs()
    schema = json_schema(specs)
    paths = [path for key in schema["properties"] for path in table_paths(schema, key)]
    return schema, {
        name: [path for path in paths if config_page_of(path, specs) == name] for name in CONFIG_PAGES
    }


def config_page_of(path: str, specs: Mapping[str, Mapping[str, Spec]]) -> str:
    """Return the page of a table: that of its backend where the path names one, else that of its first key."""
    first, *inner = path.split(".")
    if set(inner) & set(specs["rollout_engines"]):
        return "sampling"
    if set(inner) & set(specs["train_engines"]):
        return "train_engines"
    return next((name for name, (_, keys) in CONFIG_PAGES.items() if first in keys), "trainers")


def config_page(name: str) -> str:
    """Return the tables of one page; tables with the same keys are one section."""
    schema, pages = config_tables()
    return page(
        CONFIG_PAGES[name][0],
        "Every key of these tables with its type, its default and its effect. A default of — means: not set. [All tables](../config.md).",
        *(config_part(schema, paths) for paths in same_tables(schema, pages[name])),
    )


def config_index() -> str:
    """Return the keys outside of tables, the page of every table, and what a key *by name* accepts."""
    specs = our_specs()
    schema, pages = config_tables()
    tables = [
        [
            f"[{title.removeprefix('Config: ')}](config/{name}.md)",
            ", ".join(map(partial(shown, schema), named)),
        ]
        for name, (title, _) in CONFIG_PAGES.items()
        if (
            named := [
                path
                for first, *same in same_tables(schema, pages[name])
                for path in [first, *top_level(same)]
            ]
        )
    ]
    offers = our_offers()
    rows = [
        [spec_class(kind).noun, f"`{name}`", f"`{offers[kind, name].distribution.name}`"]
        for kind, named in specs.items()
        if not spec_class(kind).internal  # no key of a run file takes it
        for name in named
    ]
    return page(
        "Config reference",
        "Every table and key of a run file, of the core and of the plugins in this repository. `engine schema KEY` shows the same for\n"
        "what you have installed, and `engine config show FILE --origin` where each value of a run comes from.",
        "## Tables",
        table(["page", "tables"], tables),
        config_part(schema, [""], "Top level"),
        "```{toctree}\n:hidden:\n" + "\n".join(f"config/{name}" for name in CONFIG_PAGES) + "\n```",
        "## Names",
        "The values of a key that is set *by name*, and the distribution that provides each.",
        table(["what", "name", "distribution"], rows),
    )


def top_level(paths: list[str]) -> list[str]:
    return [path for path in paths if "." not in path]


def table_paths(schema: Table, path: str) -> Iterator[str]:
    """Yield the path of a table and of the tables in it; nothing for a plain key or a name without options."""
    parent, _, key = path.rpartition(".")
    properties = schema_at(schema, parent)["properties"]
    if key not in properties or not is_table(schema, properties[key]):
        return
    names = schema_at(schema, path)["properties"]
    if names:
        yield path
    for name in names:
        yield from table_paths(schema, f"{path}.{name}")


def same_tables(schema: Table, paths: list[str]) -> list[list[str]]:
    """Group paths whose tables have the same keys and description, such as ``actor.fsdp`` and ``critic.fsdp``."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(config_part(schema, [path], ""), []).append(path)
    return list(groups.values())


def shown(schema: Table, path: str) -> str:
    """Return the header of a table as a run file has it: ``[actor]``, or ``[[reward]]`` for a list of tables."""
    parent, _, key = path.rpartition(".")
    many = "items" in schema_at(schema, parent)["properties"][key]
    return f"`[[{path}]]`" if many else f"`[{path}]`"


def config_part(schema: Table, paths: list[str], title: str | None = None) -> str:
    """Return the section of one path, the one that the description names or the first; the others have the same keys."""
    description = schema_at(schema, paths[0]).get("description", "")
    paths = sorted(paths, key=lambda path: not description.startswith(f"``[{path}]``"))
    node = schema_at(schema, paths[0])
    rows = []
    for key, inner in node["properties"].items():
        if is_table(schema, inner):
            continue
        default = inner.get("default")
        value = "—" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
        if key in node.get("required", ()):
            value = "required"
        rows.append(
            [
                f"`{key}`",
                f"`{type_text(inner).replace(NO_NAME, 'string')}`",  # other distributions may offer names
                value,
                plain(inner.get("description", "")),
            ]
        )
    text = plain(node.get("description", ""))
    about = re.sub(r"^(`\[+[\w.]+\]+`[:,]? ?)+", "", text)
    others = f"The same keys: {', '.join(shown(schema, path) for path in paths[1:])}." if paths[1:] else ""
    listed = table(["key", "type", "default", "what it does"], rows) if rows else ""
    heading = f"## {shown(schema, paths[0]) if title is None else title}"
    return "\n\n".join(filter(None, [heading, about[:1].upper() + about[1:], others, listed]))
