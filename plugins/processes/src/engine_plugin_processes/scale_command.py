"""``engine scale``: how many samplers a run has, while it goes on."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated

import typer

from engine_core.cli.options import Json, Run
from engine_core.cli.output import print_json
from engine_core.errors import ConfigError
from engine_core.runs.tracking import RunFolder
from engine_plugin_processes.scale_requests import read_request, write_request

if TYPE_CHECKING:
    from engine_core.config.models import PlacementConfig

Samplers = Annotated[
    int | None, typer.Argument(metavar="SAMPLERS", help="How many there are to be; default: only show it.")
]


def scale(run: Run, samplers: Samplers = None, as_json: Json = False) -> None:
    """Have another number of samplers while a run goes on, within placement.max_samplers; or show how many there are.

    The run looks at each update of its weights: new ones are started in the background and take part from a later
    update on, and the last ones leave.
    """
    folder = RunFolder.open(run)
    pool, placement = _range(folder)
    start, most = placement.pools[pool], placement.max_samplers[pool]
    if samplers is not None:
        if not 1 <= samplers <= most:
            raise ConfigError(
                f"SAMPLERS: got {samplers}, expected 1 to {most} (placement.max_samplers.{pool} of {folder.path})."
            )
        if not folder.in_use:
            before = _wanted(folder, start, most)
            then = (
                f" and has {before} from its first update of weights on, as was asked for last"
                if before != start
                else "; --set changes it"
            )
            raise ConfigError(
                f"SAMPLERS: {folder.path} does not run, and the number of samplers changes while a run goes on. "
                f"'engine resume {folder.path}' starts with placement.pools.{pool} = {start} of them{then}."
            )
        write_request(folder.path, samplers)
    shown = {"requested": _wanted(folder, start, most), "running": _there(folder), "max": most}
    if as_json:
        print_json(shown)
        return
    there = (
        "no step has reported yet how many run" if shown["running"] is None else f"{shown['running']} running"
    )
    print(f"samplers: {shown['requested']} requested, {there}, at most {most}")


def _range(folder: RunFolder) -> tuple[str, PlacementConfig]:
    """The pool whose number changes, and the run's placement.

    Raises:
        ConfigError: none does.
    """
    from engine_core.config.models import PlacementConfig

    settings = tomllib.loads(folder.config_file.read_text(encoding="utf-8"))
    placement = PlacementConfig.model_validate(settings.get("placement", {}))
    backend = settings.get("runtime", {}).get("backend", "local")
    if backend == "local":
        raise ConfigError(
            f"runtime.backend = 'local': {folder.path} has one process, and no samplers that come or leave. Use a runtime "
            "whose workers are processes."
        )
    if not placement.max_samplers:
        pool = placement.rollout if placement.rollout != placement.actor else None
        way = (
            f"as in --set placement.max_samplers.{pool}=4"
            if pool
            else "with a pool of the sampler's own in [placement]"
        )
        raise ConfigError(
            f"placement.max_samplers: {folder.path} has none, so it keeps the samplers that it starts with. Set it when the run is "
            f"started or resumed, {way}."
        )
    return next(iter(placement.max_samplers)), placement


def _wanted(folder: RunFolder, start: int, most: int) -> int:
    """As was asked for last, else as the run starts."""
    try:
        return read_request(folder.path, most) or start
    except ValueError:
        return start  # the run ignores it too


def _there(folder: RunFolder) -> int | None:
    """As the newest step has told; None where none has."""
    told = [line["sampling/samplers"] for line in folder.read_metrics() if "sampling/samplers" in line]
    return int(told[-1]) if told else None
