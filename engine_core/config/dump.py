"""A config as TOML, and where each of its values came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from engine_core.config.choices import holder_of, keys_of, places
from engine_core.config.read import Path_, key_text, quoted
from engine_core.redaction import REDACTED, secrets_in

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig


def as_data(config: EngineConfig) -> dict[str, Any]:
    """Plain values as a TOML holds them: option tables under their names, keys without a value left out."""
    data = _plain(config)
    for place in places(data):
        holder = holder_of(config, place.path)
        for chosen in place.chosen:
            found = getattr(holder, chosen.field)
            options = found.get(chosen.name) if chosen.kind == "trackers" else found
            free = chosen.table not in keys_of(type(holder))  # a name like a key of the core has no table
            if free and isinstance(options, BaseModel) and type(options).model_fields:
                place.table[chosen.table] = place.table.get(chosen.table, {}) | _plain(options)
    return data


def _plain(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_none=True)


def dump_toml(config: EngineConfig, masked: bool = False) -> str:
    """The resolved config: every key with its value, read back as an equal config.

    Relative paths were resolved when it was loaded, so the text means the same from any folder.
    ``masked`` replaces the values of keys that are named like a secret: for eyes, not to be read back.
    """
    data = as_data(config)
    return "\n".join(_table_lines(_masked(data) if masked else data, ())).lstrip("\n") + "\n"


def _masked(node: Any) -> Any:
    if isinstance(node, list):
        return [_masked(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    return {
        key: REDACTED if isinstance(value, str) and any(secrets_in({key: value})) else _masked(value)
        for key, value in node.items()
    }


def _table_lines(table: Mapping[str, Any], path: Path_) -> Iterator[str]:
    def is_tables(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)

    below = {key: value for key, value in table.items() if isinstance(value, dict) or is_tables(value)}
    for key, value in table.items():
        if key not in below:
            yield f"{key_text((key,))} = {_value(value)}"
    for key, value in below.items():
        inner = (*path, key)
        for entry in [value] if isinstance(value, dict) else value:
            header = f"[{key_text(inner)}]" if isinstance(value, dict) else f"[[{key_text(inner)}]]"
            yield from ("", header)
            yield from _table_lines(entry, inner)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(entry) for entry in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key_text((key,))} = {_value(entry)}' for key, entry in value.items())}}}"
    return repr(value)  # int; float: "1e-06", "inf" and "nan" are TOML


def origins(config: EngineConfig) -> list[tuple[str, Any, str]]:
    """Key, value and where it was set (``default`` where it was not), in the order of the tables.

    Values of keys that are named like a secret are replaced.
    """
    known = config._source.origins if config._source else {}
    return [
        (key_text(path), value, str(known.get(key_text(path), "default")))
        for path, value in leaves(_masked(as_data(config)))
    ]


def leaves(node: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, list) and node and all(isinstance(entry, dict) for entry in node):
        for number, entry in enumerate(node):
            yield from leaves(entry, (*path, entry.get("name", str(number))))
    else:
        yield path, node
