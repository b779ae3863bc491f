"""The JSON schema of a run file: the core's tables with those of every installed plugin; a part of it as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import AUTO, CHOICES, model_of
from engine_core.config.models import EngineConfig
from engine_core.config.roles import CriticConfig
from engine_core.errors import ConfigError, did_you_mean
from engine_core.tables import MOST

if TYPE_CHECKING:
    from engine_core.specs import Spec

Schema = dict[str, Any]
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def json_schema(specs: Mapping[str, Mapping[str, Spec]]) -> Schema:
    """Return the schema of a whole run file.

    Args:
        specs: kind -> name -> spec, for all tables to include.
    """
    schema = EngineConfig.model_json_schema(mode="serialization")  # without the loader's own fields
    definitions = schema["$defs"]
    tables = {model_of(section): choices for section, choices in CHOICES.items()}  # actor and ref are one
    for model, choices in tables.items():
        for key, kind, _ in choices:
            table = schema if model is EngineConfig else definitions[model.__name__]
            offered = specs.get(kind, {})
            if model is CriticConfig:  # always trained; the table of an actor is that of a teacher too
                offered = {
                    name: spec for name, spec in offered.items() if not getattr(spec, "frozen_only", False)
                }
            _offer(table["properties"][key], [*offered, *(word for of, word in AUTO.items() if of == kind)])
            _mount(table, offered, definitions)
    _mount(definitions["PluginsConfig"], specs.get("plugins", {}), definitions)
    for name, spec in [item for named in specs.values() for item in named.items()]:
        # names that the name's own table chooses
        own = definitions.get(f"{spec.kind}.{name}.{spec.config.__name__}")
        for key, kind in getattr(spec.config, "chooses", {}).items() if own else ():
            _offer(own["properties"][key], specs.get(kind, {}))
    schema["properties"]["extends"] = {
        "description": "Files that this one builds on, relative to it.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Run file of engine",
    }


def _mount(table: Schema, specs: Mapping[str, Spec], definitions: Schema) -> None:
    """Add the option table of each name."""
    table.setdefault("properties", {})
    for name, spec in specs.items():
        if name in table["properties"] and "." not in table["properties"][name].get("$ref", ""):
            continue  # a name that equals a core key or table has no table
        prefix = f"{spec.kind}.{name}."
        options = spec.config.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
        for inner, definition in options.pop("$defs", {}).items():
            definitions[prefix + inner] = definition
        reference = f"{prefix}{spec.config.__name__}"
        if present := table["properties"].get(name):  # an advantage and a loss of one name share a table
            other = definitions[present["$ref"].removeprefix("#/$defs/")]
            options["properties"] = {**other.get("properties", {}), **options.get("properties", {})}
        definitions[reference] = options
        table["properties"][name] = {"$ref": f"#/$defs/{reference}"}


def _offer(chooser: Schema, specs: Collection[str]) -> None:
    """Restrict a key, or each element of its list, to the names."""
    names = {"anyOf": [{"enum": sorted(specs)}, {"type": "string", "pattern": ":"}]}  # "dist:name"
    if chooser.get("type") == "array":
        chooser["items"] = names
    else:
        chooser.pop("type", None)
        chooser.update(names)


def schema_at(schema: Schema, path: str) -> Schema:
    """Return the part of ``json_schema`` for one table: ``actor.torch``, ``reward.format``.

    Raises:
        ConfigError: there is no such table.
    """
    node, at = schema, ""
    for part in filter(None, path.split(".")):
        properties = _table(node, schema).get("properties", {})
        if part not in properties:
            where = f"[{at}]" if at else "A run file"
            raise ConfigError(f"{where} has no table or key '{part}'.{did_you_mean(part, properties)}")
        node, at = properties[part], f"{at}.{part}".lstrip(".")
    return {**_table(node, schema), "$defs": schema["$defs"]}


def _table(node: Schema, schema: Schema) -> Schema:
    """Return the table behind a reference, an optional reference or an array of references."""
    while True:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
        elif "properties" not in node and "anyOf" in node:
            node = next((option for option in node["anyOf"] if "$ref" in option), {})
        elif "items" in node and "$ref" in node["items"]:
            node = node["items"]
        else:
            return node


def is_table(schema: Schema, node: Schema) -> bool:
    """Return whether a node is a table, a list of tables, or an optional one."""
    return "properties" in _table(node, schema)


def describe(schema: Schema, path: str) -> str:
    """Describe the table or the key at ``path`` as text: keys, types, defaults, descriptions.

    Args:
        schema: the JSON schema of a whole run file.
        path: such as ``actor.torch`` or ``actor.optim.lr``.

    Raises:
        ConfigError: the key is unknown.
    """
    path = path.strip(".")
    table = schema_at(schema, path)
    parent, _, key = path.rpartition(".")
    holder = schema_at(schema, parent)
    if not is_table(schema, holder["properties"][key]):
        return "\n".join(_key_lines(schema, holder, path))
    lines = [f"[{path}]", *_wrapped(table, indent="")]
    for name in table["properties"]:
        lines += ["", *_key_lines(schema, table, f"{path}.{name}")]
    return "\n".join(lines if table["properties"] else [*lines, "It takes no options."])


def _key_lines(schema: Schema, table: Schema, path: str) -> list[str]:
    """Return the key at ``path`` with its default, type and description."""
    key = path.rpartition(".")[2]
    node = table["properties"][key]
    if is_table(schema, node):
        return [f"[{path}]  see: engine schema {path}", *_wrapped(node, indent="    ")]
    default = node.get("default")
    given = "not set" if default is None else json.dumps(default, ensure_ascii=False)
    if key in table.get("required", ()):
        given = "required"
    return [f"{key} = {given}  ({type_text(node)})", *_wrapped(node, indent="    ")]


NO_NAME = "no such name is installed"
"""Type of a key by name, if no installed plugin offers a name."""


def type_text(node: Schema) -> str:
    """Return a type as text: ``integer > 0``, ``"a" | "b"``, ``list of string``; an empty name (not set) is left out."""
    if "enum" in node:
        return " | ".join(json.dumps(value) for value in node["enum"] if value != "") or NO_NAME
    if "anyOf" in node:
        options = [
            option
            for option in node["anyOf"]
            if option.get("type") != "null" and option.get("pattern") != ":"
        ]
        return " or ".join(type_text(option) for option in options)
    if "prefixItems" in node:
        return f"[{', '.join(type_text(item) for item in node['prefixItems'])}]"
    if node.get("type") == "array":
        return f"list of {type_text(node.get('items', {}))}"
    bounds = [f"{sign} {node[name]}" for name, sign in BOUNDS.items() if node.get(name, MOST) != MOST]
    return " ".join([node.get("type", "any"), *bounds])


def _wrapped(node: Schema, indent: str) -> list[str]:
    text = node.get("description", "").replace("``", "`")
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent)
