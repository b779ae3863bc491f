"""Commands that answer about a configuration without running it: validate, config show, schema."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.assemble import check_complete, check_inputs, plugins_for
from engine_core.cli.loading import read
from engine_core.cli.options import AllowCode, File, Files, Json, More, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.cli.schema_text import describe
from engine_core.config.dump import dump_toml, origins
from engine_core.config.schema import json_schema, schema_at
from engine_core.errors import DataError, EngineError, PluginError
from engine_core.plugins import PluginSet, known_names
from engine_core.rewards.preflight import check_rewards
from engine_core.rewards.signatures import check_functions
from engine_core.specs import TABLE_SPECS, Spec

if TYPE_CHECKING:
    from engine_core.config import EngineConfig


def validate(
    files: Files, more: More = None, sets: Sets = None, allow_code: AllowCode = False, as_json: Json = False
) -> int:
    """Check a run file: keys, types, names, plugins, files and their columns. Loads no torch."""
    try:
        config = read(files, more, sets, allow_code=allow_code)
        plugins = plugins_for(config)
        check_complete(config, plugins=plugins)
        _check_rewards(config, plugins)
        if problems := check_inputs(config):
            raise DataError("\n".join(problems))
    except EngineError as error:
        if not as_json:
            raise
        print_json({"valid": False, "problems": str(error).splitlines()})
        return error.exit_code
    if as_json:
        print_json({"valid": True, "unread": config.unread, "plugins": plugins.versions()})
        return 0
    print(f"{', '.join([*files, *(more or ())])}: valid, trainer '{config.trainer}'")
    for entry in config.unread:
        print(f"not read: {entry}")
    return 0


def _check_rewards(config: EngineConfig, plugins: PluginSet) -> None:
    """The functions of rewards that the run's trainer reads."""
    trainer: Any = plugins.spec("trainers", config.trainer)
    if config.reward and (trainer.sections is None or "reward" in trainer.sections):
        check_functions(config.reward, plugins)
        check_rewards(config.reward, plugins)


def show(
    file: File,
    more: More = None,
    sets: Sets = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also where each value was set: file and line, or default.")
    ] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Print the resolved config: every key with the value that a run would use."""
    config = read([file], more, sets, allow_code=allow_code)
    rows = origins(config)
    if as_json:
        print_json(
            {key: {"value": value, "origin": where} if origin else value for key, value, where in rows}
        )
    elif origin:
        print_table(
            [(key, str(value), where) for key, value, where in rows], header=("KEY", "VALUE", "ORIGIN")
        )
    else:
        print(dump_toml(config, masked=True), end="")


def schema(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A table or key, such as actor.torch.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the JSON schema of run files over all installed plugins, or what one table holds.

    For an editor: engine schema > engine.schema.json, and '#:schema ./engine.schema.json' as the
    first line of a run file.
    """
    whole = json_schema(installed_specs())
    if not key:
        print_json(whole)
    elif as_json:
        print_json(schema_at(whole, key))
    else:
        print(describe(whole, key))


def installed_specs() -> dict[str, dict[str, Spec]]:
    """The spec of every name that is installed; a plugin that does not load is named on stderr and left out."""
    specs: dict[str, dict[str, Any]] = {kind: {} for kind in TABLE_SPECS}
    for kind in TABLE_SPECS:
        for name in known_names(kind):
            try:
                specs[kind][name] = PluginSet.load({kind: [name]}).spec(kind, name)
            except PluginError as error:
                print(f"engine: left out of the schema: {error}", file=sys.stderr)
    return specs
