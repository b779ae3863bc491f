"""A part of the JSON schema as readable text: keys, types, defaults, descriptions."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from engine_plugin_tools.schema import schema_at

Node = Mapping[str, Any]
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def describe(schema: Node, path: str) -> str:
    """Describe the table or the key at ``path``.

    Args:
        schema: the JSON schema of a whole run file.
        path: such as ``actor.torch`` or ``actor.optim.lr``.

    Raises:
        ConfigError: the key is unknown.
    """
    path = path.strip(".")
    parent, _, key = path.rpartition(".")
    schema_at(dict(schema), path)  # raises for an unknown key
    holder = schema_at(dict(schema), parent)
    node = holder["properties"][key]
    table = is_table(schema, node)
    lines = (
        _table(schema, path) if table else _key(schema, parent, key, node, key in holder.get("required", ()))
    )
    return "\n".join(lines)


def _table(schema: Node, path: str) -> Iterator[str]:
    node = schema_at(dict(schema), path)
    yield f"[{path}]"
    yield from _wrapped(node.get("description", ""), indent="")
    for key, inner in node["properties"].items():
        yield ""
        yield from _key(schema, path, key, inner, key in node.get("required", ()))
    if not node["properties"]:
        yield "It takes no options."


def _key(schema: Node, path: str, key: str, node: Node, required: bool) -> Iterator[str]:
    if is_table(schema, node):
        yield f"[{path}.{key}]  see: engine schema {path}.{key}"
    else:
        default = node.get("default")
        given = (
            "required"
            if required
            else "not set"
            if default is None
            else json.dumps(default, ensure_ascii=False)
        )
        yield f"{key} = {given}  ({type_text(node)})"
    yield from _wrapped(node.get("description", ""), indent="    ")


def is_table(schema: Node, node: Node) -> bool:
    """Return whether a node is a table, a list of tables, or an optional one."""
    if "$ref" in node:
        return "properties" in schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
    inner = [*node.get("anyOf", ()), *([node["items"]] if "items" in node else [])]
    return any(is_table(schema, option) for option in inner)


def type_text(node: Node) -> str:
    """Return a type as text: ``integer > 0``, ``"a" | "b"``, ``list of string``."""
    if "enum" in node:
        return " | ".join(json.dumps(value) for value in node["enum"]) or "no such name is installed"
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
    bounds = [f"{sign} {node[name]}" for name, sign in BOUNDS.items() if name in node]
    return " ".join([node.get("type", "any"), *bounds])


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text.replace("``", "`"), 100, initial_indent=indent, subsequent_indent=indent)
