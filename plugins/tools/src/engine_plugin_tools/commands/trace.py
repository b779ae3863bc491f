"""``engine trace``: the timeline of a run as a file for trace viewers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from engine_core.cli.options import Run
from engine_core.errors import ConfigError
from engine_core.runs.tracking import RunFolder
from engine_plugin_tools.output_files import write_output


def trace(
    run: Run,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="FIRST:LAST",
            help="Only these steps, such as 5:8 or 5; default: all that are kept.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Default: trace.json in the run folder."),
    ] = None,
) -> None:
    """Write the timeline of a run as a trace file, which ui.perfetto.dev and chrome://tracing open; prints its path.

    The run may be running, or have failed.

    Example: engine trace latest --steps 5:8

    Raises:
        ConfigError: ``--steps`` is no range of steps.
    """
    from engine_plugin_tools.timeline import as_trace, of_steps, read_spans

    folder = RunFolder.open(run).path
    spans = read_spans(folder)
    if steps is not None:
        found = re.fullmatch(r"(\d+)(?::(\d+))?", steps)
        if found is None:
            raise ConfigError(f"--steps '{steps}': expected a step or FIRST:LAST, such as 5 or 5:8.")
        spans = of_steps(spans, int(found[1]), int(found[2] or found[1]))
    path = out or folder / "trace.json"
    write_output(path, json.dumps(as_trace(spans)))
    print(path)
