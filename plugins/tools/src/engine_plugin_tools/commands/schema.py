"""``engine schema``: the keys of run files, over all installed plugins."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from engine_core.cli.options import Json
from engine_core.cli.output import print_json
from engine_core.errors import PluginError
from engine_core.plugins.metadata import TABLES, known_names
from engine_core.plugins.plugin_set import PluginSet
from engine_core.specs import TABLE_SPECS, Spec
from engine_plugin_tools.schema import describe, json_schema, schema_at


def schema(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A table or key, such as actor.torch.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the JSON schema of run files over all installed plugins, or what one table holds.

    For an editor: engine schema > engine.schema.json, and '#:schema ./engine.schema.json' as the
    first line of a run file.

    Example: engine schema actor.optim
    """
    whole = json_schema(installed_specs())
    if not key:
        print_json(whole)
    elif as_json:
        print_json(schema_at(whole, key))
    else:
        print(describe(whole, key))


def installed_specs() -> dict[str, dict[str, Spec]]:
    """Return the spec of every installed name by kind: first the core's kinds, then those that plugins define.

    A plugin that does not load is named on stderr and left out.
    """
    specs: dict[str, dict[str, Any]] = {}
    for kind in [*TABLE_SPECS, *sorted(known_names(TABLES)), "plugins"]:
        specs[kind] = {}
        for name in known_names(kind):
            try:
                plugins = PluginSet.load({}, [name]) if kind == "plugins" else PluginSet.load({kind: [name]})
                specs[kind][name] = plugins.spec(kind, name)
            except PluginError as error:
                print(f"engine: left out of the schema: {error}", file=sys.stderr)
    return specs
