"""Many simulated runs: each mode at each number of workers, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from engine_plugin_tools.bench.simulator.runs import MODES, Setting, simulate

COLUMNS = {
    "workers": "{:d}",
    "mode": "{}",
    "step_s": "{:.2f}",
    "tokens_per_s": "{:,.0f}",
    "idle_samplers": "{:.0%}",
    "idle_trainers": "{:.0%}",
    "idle": "{:.0%}",
    "age": "{:.2f}",
    "controller_s": "{:.3f}",
    "controller_share": "{:.2%}",
}
"""Columns of the table, with their formats."""


def sweep(setting: Setting, workers: Sequence[int], modes: Sequence[str]) -> list[dict[str, Any]]:
    """Simulate each mode at each number of workers; return the results of ``simulate`` without the lines of each step.

    Args:
        setting: everything else.
        workers: devices.
        modes: names of ``MODES``.
    """
    settings = [dataclasses.replace(setting, workers=count, mode=mode) for count in workers for mode in modes]
    found = []
    for each in settings:  # all were checked before the first one runs
        result = simulate(each)
        del result["lines"]
        found.append(result)
        print(
            f"{each.workers} workers, {each.mode}: {result['step_s']:.4g} s a step",
            file=sys.stderr,
            flush=True,
        )
    return found


def table(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of ``COLUMNS``; ``age`` is the mean staleness of the learned tokens."""
    rows = []
    for result in results:
        age = sum(int(old) * share for old, share in result["staleness"].items())
        rows.append([form.format((result | {"age": age})[name]) for name, form in COLUMNS.items()])
    return rows


def about(setting: Setting) -> dict[str, Any]:
    """Return the parameters that all runs of a sweep share, for a file."""
    plain = dataclasses.asdict(setting)
    return {name: value for name, value in plain.items() if name not in ("workers", "mode")}


def every_mode() -> list[str]:
    """Return the names of all modes."""
    return list(MODES)
