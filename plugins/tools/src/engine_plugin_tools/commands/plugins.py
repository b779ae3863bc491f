"""``engine plugins``: the installed plugins and their state."""

from __future__ import annotations

from typing import Annotated

import typer

from engine_core.cli.options import Json
from engine_core.cli.output import print_table
from engine_core.errors import ConfigError, PluginError, did_you_mean
from engine_plugin_tools.plugin_list import as_json, list_plugins


def plugins(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="List one kind alone, with a description of each name, such as rewards."
        ),
    ] = "",
    as_json_: Json = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Import all plugins; exit code 3 if one fails."),
    ] = False,
) -> int:
    """List the installed plugins: name, kind, distribution, version and state.

    Reads metadata only. Plugins are imported with --check, and those of KIND for a description of each name.

    Example: engine plugins rewards

    Raises:
        ConfigError: no installed plugin is of this kind.
    """
    kind = kind.replace("-", "_")  # as in `engine new plugin --kind`
    found = list_plugins(check, kind)
    kinds = sorted({info.kind for info in found})
    if kind and kind not in kinds:
        raise ConfigError(f"KIND: no installed plugin is of the kind '{kind}'.{did_you_mean(kind, kinds)}")
    found = [info for info in found if kind in ("", info.kind)]
    if as_json_:
        print(as_json(found))
    else:
        header = ("NAME", "KIND", "DISTRIBUTION", "VERSION", "STATE", *(["DESCRIPTION"] if kind else []))
        rows = [
            (info.name, info.kind, info.distribution, info.version, info.state, info.description)
            for info in found
        ]
        print_table([row[: len(header)] for row in rows], header)
    broken = [info for info in found if not info.healthy]
    return PluginError.exit_code if check and broken else 0
