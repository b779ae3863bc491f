"""Commands that check or print a configuration without running it: ``validate`` and ``config show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import print_unread, read
from engine_core.cli.options import AllowCode, Files, Json, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.config.assemble import check_inputs, plugins_for
from engine_core.config.completeness import check_complete
from engine_core.config.dump import dump_toml, origins
from engine_core.errors import DataError, EngineError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards.preflight import check_rewards
from engine_core.rewards.signatures import check_functions

if TYPE_CHECKING:
    from engine_core.config import EngineConfig


def validate(files: Files, sets: Sets = None, allow_code: AllowCode = False, as_json: Json = False) -> int:
    """Check a run file: keys, types, names, plugins, files and their columns. Loads no torch.

    Raises:
        EngineError: the run file is not valid; with ``--json`` the problems are printed instead.
    """
    try:
        config = read(files, sets, allow_code=allow_code)
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
    print(f"{', '.join(files)}: valid, trainer '{config.trainer}'")
    print_unread(config)
    return 0


def _check_rewards(config: EngineConfig, plugins: PluginSet) -> None:
    """Check the reward functions of a run whose trainer reads ``[[reward]]``."""
    trainer: Any = plugins.spec("trainers", config.trainer)
    if config.reward and (trainer.sections is None or "reward" in trainer.sections):
        check_functions(config.reward, plugins)
        check_rewards(config.reward, plugins)


def show(
    files: Files,
    sets: Sets = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also where each value was set: file and line, or default.")
    ] = False,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Print the resolved config: every key with the value that a run would use."""
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
