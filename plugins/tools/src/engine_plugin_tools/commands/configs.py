"""Commands that check or print a configuration without running it: ``validate`` and ``config show``."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from engine_core.cli.loading import check_config, print_unread, read
from engine_core.cli.options import AllowCode, Files, Json, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.config.assemble import plugins_for
from engine_core.config.dump import dump_toml, origins
from engine_core.errors import EngineError, refuse
from engine_plugin_tools.families import declared_families

PLACE = re.compile(
    r"((?P<file>[^:]+):(?P<line>\d+)(:\d+)?|(?P<bare>[^: ]+\.(jsonl?|csv|parquet|toml))|--set (?P<set>[^:]+)|environment \w+): "
)
KEY = re.compile(r"(?P<key>[a-z_]+(\.[\w.\"/*-]+)?): ")


def validate(files: Files, sets: Sets = None, allow_code: AllowCode = False, as_json: Json = False) -> int:
    """Check a run file: keys, types, names, plugins, files and their columns. Loads no torch.

    The last lines say whether each backend was tested with models of this type.

    Example: engine validate run.toml

    Raises:
        EngineError: the run file is not valid; with ``--json`` the problems are printed instead.
    """
    try:
        config = read(files, sets, allow_code=allow_code)
        errors = check_config(config)
    except EngineError as error:
        errors = [error]
    if errors and as_json:
        problems = [as_record(line, error) for error in errors for line in str(error).splitlines()]
        print_json({"valid": False, "problems": problems})
        return errors[0].exit_code
    refuse(errors)
    plugins = plugins_for(config)
    models = list(declared_families(config, plugins))
    if as_json:
        print_json({"valid": True, "unread": config.unread, "plugins": plugins.versions(), "models": models})
        return 0
    print(f"{', '.join(files)}: valid, trainer '{config.trainer}'. Next: engine train --dry-run")
    print_unread(config)
    for model in models:
        print(f"{model['role']}: {model['message']}")
    return 0


def as_record(line: str, error: EngineError) -> dict[str, Any]:
    """Return a line of an error as ``{code, file, line, key, message, hint}``; what it does not name is None.

    Args:
        line: ``FILE:LINE: KEY: message. Hint.``
        error: the error, whose class is the code.
    """
    place = PLACE.match(line)
    rest = line[place.end() :] if place else line
    named = place.groupdict() if place else dict.fromkeys(PLACE.groupindex)
    key = KEY.match(rest)
    message, _, hint = rest[key.end() if key else 0 :].partition(". ")
    return {
        "code": type(error).__name__,
        "file": named["file"] or named["bare"],
        "line": int(named["line"]) if named["line"] else None,
        "key": key["key"] if key else named["set"],
        "message": message,
        "hint": hint or None,
    }


def show(
    files: Files,
    sets: Sets = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also where each value was set: file and line, or default.")
    ] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Print the resolved config: every key with the value that a run would use.

    Example: engine config show run.toml --origin
    """
    config = read(files, sets, allow_code=allow_code)
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
