"""The page of one run or of several over each other: one file of HTML that loads nothing.

It is made from the files of the run folders alone, so a run may still be running, may have failed, or may come from
another machine. Texts of a model are untrusted: they are in a block of JSON without ``<``, and the page's script shows
them as text. Only that script runs, because the page's policy names its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from engine_core.errors import DataError
from engine_core.runs.logs import PHASES, with_interval
from engine_core.runs.tracking import RunFolder
from engine_plugin_tools.health import health_of
from engine_plugin_tools.output_files import write_output
from engine_plugin_tools.run_state import run_state
from engine_plugin_tools.stored_rollouts import LIMITS, stored_rollouts

Metrics = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl

POINTS = 2000
"""Most points of a curve; a longer run has the mean of several steps in each."""
HEADLINE = (
    ("held-out accuracy", "eval/accuracy", "{:.2f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out loss", "eval/nll", "{:.4f}"),
    ("loss", "actor/loss", "{:.4f}"),
    ("sampler gap", "mismatch/mean_abs", "{:.1e}"),
    ("response length", "response_length/mean", "{:.1f}"),
    ("tokens/s generated", "throughput/generated_tokens_per_second", "{:,.0f}"),
    ("tokens/s trained", "throughput/train_tokens_per_second", "{:,.0f}"),
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'; {policy}">
<title>Engine report</title>
<style>{style}</style>
</head>
<body data-live="{live}">
<main id="page"></main>
<noscript>This page needs JavaScript; nothing is loaded from anywhere.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

log = logging.getLogger("engine")


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of one run, or of several over each other, and return its file.

    Args:
        paths: the run folders.
        out: the file; default: ``report.html`` in the only run's folder, ``report-A-B.html`` in that of the first of several.

    Raises:
        EnvironmentProblem: the file cannot be written.
        DataError: a run has a config that is no TOML.
    """
    others = "-".join(["", *(path.name for path in paths)]) if len(paths) > 1 else ""
    target = out or paths[0] / f"report{others}.html"
    write_output(target, page(page_data(paths)))
    return target


def page(data: Mapping[str, Any], live: bool = False) -> str:
    """Return the page of some runs.

    Args:
        data: as ``page_data`` returns it.
        live: whether the page asks its server for newer data, the only address that it may connect to.
    """
    files = resources.files("engine_plugin_tools") / "page"
    read = [files / "uplot" / "uPlot.min.css", files / "page.css", files / "uplot" / "uPlot.iife.min.js", files / "page.js"]  # fmt: skip
    texts = [file.read_text(encoding="utf-8") for file in read]
    style, script = "\n".join(texts[:2]), "\n".join(texts[2:])
    policy = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'" + "; connect-src 'self'" * live
    return PAGE.format(policy=policy, style=style, live=int(live), data=as_json(data), script=script)


def as_json(value: Any) -> str:
    """Return JSON in ASCII that cannot end the element of a page in which it is."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_data(paths: Sequence[Path], rollouts: bool = True) -> dict[str, Any]:
    """Return what the page shows of some runs, as plain values.

    Args:
        paths: the run folders.
        rollouts: whether to read the stored rollouts, which takes the most time.
    """
    names = [path.name for path in paths]
    runs = [run_data(path) | (_sets(path) if rollouts else {"sets": None}) for path in paths]
    for run, path in zip(runs, paths, strict=True):
        if names.count(path.name) > 1:
            run["name"] = "/".join(path.parts[-3:])
    return {"written": time.strftime("%Y-%m-%d %H:%M"), "limits": LIMITS, "runs": runs}


def run_data(path: Path) -> dict[str, Any]:
    """Return what the page shows of a run, without its rollouts: state, facts, metrics by name.

    Raises:
        DataError: the config of the run is no TOML.
    """
    state, metrics = run_state(path), RunFolder(path).read_metrics()
    text = (path / "config.resolved.toml").read_text(encoding="utf-8")
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(
            f"{path}/config.resolved.toml is no TOML: {error}. Its folder logs has a copy for each attempt."
        ) from error
    steps, series, each = _series(metrics)
    return {
        "name": state.name,
        "state": state.state,
        "reason": state.reason,
        "step": state.step,
        "planned": state.steps,
        "about": _about(config),
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(state.started)),
        "seconds": round(state.updated - state.started),
        "attempts": state.attempts,
        "headline": _headline(metrics),
        "health": health_of(metrics),
        "warnings": state.warnings,
        "steps": steps,
        "steps_in_a_point": each,
        "metrics": series,
        "phases": [name for name in PHASES if f"time/{name}" in series],
        "facts": _facts(path, metrics),
        "config": text,
    }


def _sets(path: Path) -> dict[str, Any]:
    try:
        return {"sets": stored_rollouts(path / "rollouts")}
    except DataError as error:
        log.warning("The page lacks the completions of %s: %s", path.name, error)
        return {"sets": [], "unreadable": str(error)}


def _about(config: Mapping[str, Any]) -> dict[str, str]:
    """Return model, algorithm and data of a run in a few words."""
    trainer, data = config.get("trainer", ""), config.get("data", {})
    algorithm = config.get("algorithm", {})
    rl = f"{algorithm.get('advantage')}, {algorithm.get('loss')}"
    sources = [data.get("train"), data.get("source"), *(part.get("path") or part.get("source") for part in data.get("mix", ()))]  # fmt: skip
    model = str(config.get("model", {}).get("path", ""))
    return {
        "model": Path(model).name if Path(model).is_absolute() else model,
        "algorithm": {"rl": rl, "async": f"{rl}, async"}.get(trainer, trainer),
        "data": ", ".join(Path(each).name for each in sources if isinstance(each, str) and each),
    }


def _series(metrics: Metrics) -> tuple[list[int], dict[str, list[float | None]], int]:
    """Return steps, values of each metric (None where a step has none), and the number of steps in a point."""
    each = math.ceil(len(metrics) / POINTS) or 1
    parts = [metrics[i : i + each] for i in range(0, len(metrics), each)]
    names = dict.fromkeys(name for line in metrics for name in line if name not in ("step", "time"))
    return [part[-1]["step"] for part in parts], {name: [_mean(part, name) for part in parts] for name in names}, each  # fmt: skip


def _mean(lines: Metrics, name: str) -> float | None:
    values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
    value = statistics.fmean(values) if values else math.nan
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _headline(metrics: Metrics) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) of the most important numbers."""
    tiles = []
    rewarded = any("reward/mean" in line for line in metrics)
    for label, name, form in HEADLINE:
        measured = [line for line in metrics if line.get(name) is not None]
        if not measured or (rewarded and label in ("loss", "tokens/s trained")):
            continue
        values = [line[name] for line in measured]
        # For a noisy curve, the means of its first and last tenth.
        part, remark = max(1, len(values) // 10), "at first"
        if name.startswith("eval/"):
            part, remark = 1, "before"
        before, after = statistics.fmean(values[:part]), statistics.fmean(values[-part:])
        shown = with_interval(measured[-1], name, form) if part == 1 else form.format(after)
        tiles.append((label, shown, f"{form.format(before)} {remark}"))
    return tiles


def _facts(path: Path, metrics: Metrics) -> list[tuple[str, str]]:
    try:
        return _environment(json.loads((path / "env.json").read_text(encoding="utf-8")), metrics)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # a copy without it, or one of another version
        return [("environment", f"env.json cannot be read: {error}")]


def _environment(environment: Mapping[str, Any], metrics: Metrics) -> list[tuple[str, str]]:
    seconds = sum(line.get("time/step") or 0.0 for line in metrics)
    git, command = environment["git"], environment["command"]
    versions = {name: ", ".join(" ".join(each) for each in environment[name].items()) for name in ("packages", "plugins")}  # fmt: skip
    facts = {
        "command": " ".join([Path(command[0]).name, *command[1:]]),
        "machine": f"{environment['host']}, {environment['cpus']} CPUs, {environment['platform']}",
        "python": environment["python"],
        **versions,
        "commit": git and git["sha"][:12] + (" and changes" if git["changed_files"] else ""),
        "time in steps": seconds and f"{seconds:,.1f} s",
    }
    for name, file in environment["data"].items():
        facts[f"data {Path(name).name}"] = f"{name}, sha256 {(file.get('sha256') or '')[:16]}"
    return [(name, value) for name, value in facts.items() if value]
