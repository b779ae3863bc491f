"""A run as one page: ``report.html`` (self-contained, loads nothing) and ``curves.png``.

It is made from the files of the run folder alone, so the run may still be running, may have died, or may come from
another machine.
"""

from __future__ import annotations

import io
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError
from engine_core.runs.logs import with_interval
from engine_core.runs.tracking import RunFolder, read_rollouts
from engine_plugin_tools.advice import advice
from engine_plugin_tools.packages import require_package
from engine_plugin_tools.transcripts import transcript

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from engine_core.types import Rollout

Metrics = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
OF_EPISODES = {f"time/episode_{phase}": phase for phase in ("sampling", "tool", "waiting")}
PHASES = ("generate", "reward", "log_probs", "train", "sync")
GENERATED, TRAINED = (f"throughput/{kind}_tokens_per_second" for kind in ("generated", "train"))
HELD_OUT = "Held-out scores, 95% intervals"
SCORE = re.compile(r"eval/(?:[^/]+/accuracy|(?:[^/]+/)?(?:pass|maj)@\d+)")
# title -> label of each metric; a panel is drawn where the run has one of them
PANELS = {
    "Reward": {"reward/mean": "training reward", "eval/accuracy": "held-out accuracy"},
    HELD_OUT: {},  # pass@k, maj@k and the accuracy of named sets, as the run has them
    "Loss": {"actor/loss": "training", "eval/nll": "held out"},
    "Mismatch of log-probs": {"mismatch/mean_abs": "mean difference", "mismatch/max_abs": "largest"},
    "KL to the reference": {"actor/kl": "to reference"},
    "Response length, tokens": {"response_length/mean": "mean", "response_length/max": "longest"},
    "Entropy, nats per token": {"actor/entropy": "entropy"},
    "Gradient norm": {"actor/grad_norm": "before clipping"},
    "Seconds of an episode, by phase": OF_EPISODES,
    "Turns of an episode": {"environment/turns": "mean"},
    "Share of failed tool calls": {"environment/tool_failure_share": "failed"},
    "Tokens per second": {GENERATED: "generated", TRAINED: "trained"},
}
LOGARITHMIC = ("Mismatch of log-probs", "KL to the reference")
SAMPLES = 6  # completions shown of a step


def write_report(run_path: Path | str) -> Path:
    """Write ``report.html`` and ``curves.png`` into a run folder and return the page.

    Raises:
        PluginError: matplotlib, which draws the curves, is not installed.
        DataError: the run does not exist, or has no metrics yet.
    """
    import jinja2

    require_package("matplotlib", "report", "A report")
    run = RunFolder.open(run_path)
    metrics = run.read_metrics()
    if not metrics:
        raise DataError(
            f"No metrics in {run.metrics_file}: the run has not finished a step, so there is nothing to report."
        )
    environment = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
    figure = draw_curves(metrics)
    figure.savefig(run.path / "curves.png", dpi=130)
    template = (
        resources.files("engine_plugin_tools").joinpath("report_template.html").read_text(encoding="utf-8")
    )
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    text = page.render(
        title=run.path.name,
        env=environment,
        facts=_facts(environment, metrics),
        headline=_headline(metrics),
        curves=_svg(figure),
        samples=_samples(run),
        transcript=transcript,
        config=(run.path / "config.resolved.toml").read_text(encoding="utf-8"),
    )
    target = run.path / "report.html"
    target.write_text(text, encoding="utf-8")
    return target


def _facts(environment: Mapping[str, Any], metrics: Metrics) -> list[tuple[str, str]]:
    seconds = sum(line.get("time/step") or 0.0 for line in metrics)
    git, command = environment["git"], environment["command"]
    facts = {
        "started": environment["started"],
        "command": " ".join([Path(command[0]).name, *command[1:]]),
        "machine": f"{environment['host']}, {environment['cpus']} CPUs, {environment['platform']}",
        "python": environment["python"],
        "packages": ", ".join(f"{name} {version}" for name, version in environment["packages"].items()),
        "plugins": ", ".join(f"{name} {version}" for name, version in environment["plugins"].items()),
        "commit": git and git["sha"][:12] + (" and changes" if git["changed_files"] else ""),
        "time in steps": seconds and f"{seconds:,.1f} s",
        "advice": advice(metrics),
    }
    return [(name, value) for name, value in facts.items() if value]


def _headline(metrics: Metrics) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) of the most important numbers."""
    tiles = [("steps", str(metrics[-1]["step"]), "")]
    rewarded = any("reward/mean" in line for line in metrics)
    for label, name, form in (
        ("held-out accuracy", "eval/accuracy", "{:.2f}"),
        *((label, name, "{:.2f}") for name, label in _scores(metrics).items()),
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "actor/loss", "{:.4f}"),
        ("sampler gap", "mismatch/mean_abs", "{:.1e}"),
        ("response length", "response_length/mean", "{:.1f}"),
        ("tokens/s generated", GENERATED, "{:,.0f}"),
    ):
        _, values = _points(metrics, name)
        if not values or (label == "loss" and rewarded):
            continue
        # For a noisy curve, the means of its first and last tenth.
        part, remark = max(1, len(values) // 10), "at first"
        if name.startswith("eval/"):
            part, remark = 1, "before"
        before, after = statistics.fmean(values[:part]), statistics.fmean(values[-part:])
        measured = [line for line in metrics if line.get(name) is not None]
        shown = with_interval(measured[-1], name, form) if part == 1 else form.format(after)
        tiles.append((label, shown, f"{form.format(before)} {remark}"))
    return tiles


def _samples(run: RunFolder) -> list[tuple[str, list[Rollout]]]:
    """Return completions of the first and last evaluation, or else of the first and last step."""
    held_out = sorted((run.rollouts_dir / "eval").rglob("step_*.parquet"), key=lambda file: file.name)
    files = held_out or sorted(run.rollouts_dir.glob("step_*.parquet"))
    shown = []
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
        rollouts = read_rollouts(file)
        number = int(file.stem.removeprefix("step_"))
        title = f"held-out, after step {number}" if held_out else f"step {number}"
        shown.append((title, rollouts[:: max(1, len(rollouts) // SAMPLES)][:SAMPLES]))
    return shown


def _svg(figure: Figure) -> str:
    """Return the picture as markup for a page, without the XML prolog, whose doctype contains an address."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_curves(metrics: Metrics) -> Figure:
    """Return the learning curves of a run, one panel for each question that its metrics answer."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels: list[Callable[[Axes], None]] = []
    for title, labels in {**PANELS, HELD_OUT: _scores(metrics)}.items():
        if present := {name: label for name, label in labels.items() if _points(metrics, name)[0]}:
            panels.append(partial(_draw_lines, metrics, title, present))
    if phases := [phase for phase in PHASES if any(_points(metrics, f"time/{phase}")[1])]:
        panels.append(partial(_draw_phases, metrics, phases))
    columns = min(3, len(panels)) or 1
    rows = math.ceil(len(panels) / columns) or 1
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.3 * columns, 2.9 * rows), layout="constrained")
        for place, draw in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            draw(axes)
            axes.set_xlabel("step")
    return figure


def _scores(metrics: Metrics) -> dict[str, str]:
    """Return the metrics of held-out sets that the run has, with their labels."""
    names = dict.fromkeys(name for line in metrics for name in line if SCORE.fullmatch(name))
    return {name: name.removeprefix("eval/").replace("/", " ") for name in names}


def _points(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric, for the lines that have it."""
    found = [line for line in metrics if line.get(name) is not None]
    return [line["step"] for line in found], [line[name] for line in found]


def _draw_lines(metrics: Metrics, title: str, labels: Mapping[str, str], axes: Axes) -> None:
    """Draw each metric as a faint line and its running mean; evaluations as dots."""
    axes.set_title(title)
    for number, (name, label) in enumerate(labels.items()):
        steps, values = _points(metrics, name)
        color = f"C{number}"
        if name.startswith("eval/"):
            axes.plot(steps, values, "o-", color=color, label=label)
            bounds = [_points(metrics, f"{name}_{end}") for end in ("low", "high")]
            if all(found == steps for found, _ in bounds):
                axes.fill_between(steps, bounds[0][1], bounds[1][1], color=color, alpha=0.12)
        else:
            dots = "o" if len(steps) < 3 else None  # a line of one point is not visible
            axes.plot(steps, values, color=color, alpha=0.25)
            axes.plot(steps, _running_mean(values), color=color, label=label, marker=dots)
        if title in LOGARITHMIC and min(values) > 0:
            axes.set_yscale("log")
    if len(labels) > 1:
        axes.legend()


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean over a centered window of a twentieth of the curve, cut at the ends."""
    half = max(1, len(values) // 40)
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _draw_phases(metrics: Metrics, phases: Sequence[str], axes: Axes) -> None:
    """Draw the seconds of each phase as a stack."""
    axes.set_title("Seconds per step, by phase")
    lines = [line for line in metrics if any(f"time/{phase}" in line for phase in phases)]
    seconds = [[line.get(f"time/{phase}") or 0.0 for line in lines] for phase in phases]
    axes.stackplot([line["step"] for line in lines], seconds, labels=phases)
    axes.margins(y=0.3)  # room for the legend
    axes.legend(ncols=3, loc="upper left")
