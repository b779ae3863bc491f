"""Commands that show runs: report, watch, runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engine_core.cli.options import Json
from engine_core.cli.output import print_json, print_table
from engine_core.errors import DataError
from engine_core.runs.tracking import RunFolder

Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="Run folders, their names below runs/, or 'latest'."),
]


def _folders(runs: list[str]) -> list[Path]:
    """Return the folders of runs, each once."""
    return list(dict.fromkeys(RunFolder.open(run).path for run in runs))


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Default: report.html in the run folder; of several runs report-NAME-NAME.html in the first one.",
        ),
    ] = None,
) -> None:
    """Write the page of a run, or of several runs over each other, as one HTML file; prints its path.

    Example: engine report latest
    """
    from engine_plugin_tools.report import write_report

    print(write_report(_folders(runs), out))


def watch(
    runs: Runs,
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port; 0: a free one.")
    ] = 8265,
) -> None:
    """Serve the page of runs on loopback and update it while they continue; prints its address. Ctrl-C ends it.

    Example: engine watch latest
    """
    from engine_plugin_tools.watch import watch_server

    with watch_server(_folders(runs), port) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of run folders.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs of a folder, the last active one first: state, steps done and planned, reward, time since its last step.

    Example: engine runs

    Raises:
        DataError: the folder holds no run.
    """
    from engine_plugin_tools.run_state import run_state

    paths = [file.parent for file in folder.glob("*/config.resolved.toml") if not file.parent.is_symlink()]
    if not paths:
        raise DataError(f"'{folder}' holds no run. Name the folder of the runs: engine runs FOLDER.")
    states = sorted(map(run_state, paths), key=lambda state: state.updated, reverse=True)
    if as_json:
        print_json([asdict(state) for state in states])
        return
    rows = [
        [
            state.name,
            state.state,
            f"{state.step}/{'?' if state.steps is None else state.steps}",
            "-" if state.reward is None else f"{state.reward:{'.3f' if abs(state.reward) < 1e6 else '.3g'}}",
            state.age,
            state.folder,
        ]
        for state in states
    ]
    print_table(rows, ["run", "state", "steps", "reward", "age", "folder"])
