"""A run as one page: ``report.html`` (self-contained, nothing is fetched) and ``curves.png``.

It is made from the files of the run folder alone, so it can be made of a run that still goes, that
died, or that came from another machine.
"""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError
from engine_core.tracking import RunFolder, read_rollouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Metrics = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl

COLORS = ("#2f6fde", "#e8743b", "#2b9e77", "#9467bd", "#c9a227", "#d1495b", "#6c757d")
PHASES = ("generate", "reward", "annotate", "train", "sync")
SAMPLES = 6  # completions shown of a step


def write_report(run_path: Path | str, extra: Mapping[str, Any] | None = None) -> Path:
    """Write ``report.html`` and ``curves.png`` into a run folder.

    Args:
        run_path: the run folder, or ``latest``.
        extra: what the run's files do not hold: ``title``, ``accuracy`` as ``{"before": 0.3, "after": 0.9}``,
            ``before`` and ``after`` as lists of ``{"prompt": ..., "response": ..., "reward": ...}``.

    Returns:
        The page.

    Raises:
        DataError: there is no such run, or it has no metrics yet.
    """
    import jinja2

    run, extra = RunFolder.open(run_path), extra or {}
    metrics = run.read_metrics()
    if not metrics:
        raise DataError(
            f"No metrics in {run.metrics_file}: the run has not finished a step, so there is nothing to report."
        )
    environment = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
    figure = _figure({run.path.name: metrics})
    figure.savefig(run.path / "curves.png", dpi=130)
    template = resources.files("engine_core").joinpath("report_template.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    text = page.render(
        title=extra.get("title", run.path.name),
        run=run.path.name,
        env=environment,
        facts=_facts(environment, metrics),
        headline=_headline(metrics, extra),
        curves=_svg(figure),
        samples=_samples(run, extra),
        config=(run.path / "config.resolved.toml").read_text(encoding="utf-8"),
    )
    target = run.path / "report.html"
    target.write_text(text, encoding="utf-8")
    return target


def plot_curves(runs: Mapping[str, Metrics], out: Path) -> Path:
    """Draw several runs over each other.

    Args:
        runs: lines of ``metrics.jsonl`` by label.
        out: the picture; its suffix says which format (``.png``, ``.svg``).
    """
    _figure(runs).savefig(out, dpi=130)
    return out


def _facts(environment: Mapping[str, Any], metrics: Metrics) -> list[tuple[str, str]]:
    seconds = sum(line.get("time/step") or 0.0 for line in metrics)
    git = environment["git"]
    commit = f"{git['sha'][:12]}{' and changes' if git['changed_files'] else ''}" if git else ""
    facts = {
        "started": environment["started"],
        "command": " ".join([Path(environment["command"][0]).name, *environment["command"][1:]]),
        "machine": f"{environment['host']}, {environment['cpus']} CPUs, {environment['platform']}",
        "python": environment["python"],
        "packages": ", ".join(f"{name} {version}" for name, version in environment["packages"].items()),
        "plugins": ", ".join(f"{name} {version}" for name, version in environment["plugins"].items()),
        "commit": commit,
        "time in steps": f"{seconds:,.1f} s" if seconds else "",
    }
    return [(name, value) for name, value in facts.items() if value]


def _headline(metrics: Metrics, extra: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the numbers that a reader looks for first."""
    tiles = []
    accuracy = extra.get("accuracy") or _first_and_last(metrics, "eval/accuracy")
    if accuracy:
        tiles.append(("held-out accuracy", f"{accuracy['after']:.2f}", f"{accuracy['before']:.2f} before"))
    for label, name, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "actor/loss", "{:.4f}"),
        ("sampler gap (KL)", "mismatch/kl", "{:.1e}"),
        ("response length", "response_length/mean", "{:.1f}"),
        ("tokens/s generated", "throughput/generated_tokens_per_second", "{:,.0f}"),
    ):
        ends = _first_and_last(metrics, name)
        if ends and not (label == "loss" and any("reward/mean" in line for line in metrics)):
            tiles.append((label, form.format(ends["after"]), f"{form.format(ends['before'])} at first"))
    tiles.insert(0, ("steps", str(metrics[-1]["step"]), ""))
    return tiles


def _first_and_last(metrics: Metrics, name: str) -> dict[str, float] | None:
    """Of a noisy curve: the mean of its first and of its last tenth."""
    values = [line[name] for line in metrics if line.get(name) is not None]
    if not values:
        return None
    part = 1 if name.startswith("eval/") else max(1, len(values) // 10)
    return {"before": statistics.fmean(values[:part]), "after": statistics.fmean(values[-part:])}


def _samples(run: RunFolder, extra: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Completions to read: those given, else of the first and last evaluation, else of the first and last step."""
    if "before" in extra or "after" in extra:
        return [(name, list(extra[name])[:SAMPLES]) for name in ("before", "after") if extra.get(name)]
    held_out = sorted((run.rollouts_dir / "eval").glob("step_*.parquet"))
    files = held_out or sorted(run.rollouts_dir.glob("step_*.parquet"))
    shown: list[tuple[str, list[Mapping[str, Any]]]] = []
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
        rollouts = read_rollouts(file)
        step = max(1, len(rollouts) // SAMPLES)
        rows: list[Mapping[str, Any]] = [
            {
                "prompt": r.prompt.text,
                "response": r.text,
                "reward": r.reward,
                "answer": r.prompt.columns.get("answer"),
            }
            for r in rollouts[::step][:SAMPLES]
        ]
        number = int(file.stem.removeprefix("step_"))
        shown.append((f"held-out, after step {number}" if held_out else f"step {number}", rows))
    return shown


def _svg(figure: Figure) -> str:
    """The picture as markup for a page: without the XML prolog, whose doctype names an address."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


# -------------------------------------------------------------------------
# The figure: one panel a question, drawn only where the run has an answer
# -------------------------------------------------------------------------


def _figure(runs: Mapping[str, Metrics]) -> Figure:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in _panels(runs) if panel]
    columns = min(3, len(panels)) or 1
    rows = math.ceil(len(panels) / columns) or 1
    style: Any = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#9aa3af",
        "axes.grid": True,
        "grid.color": "#e7eaee",
        "axes.axisbelow": True,
        "xtick.color": "#4b5563",
        "ytick.color": "#4b5563",
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(4.3 * columns, 2.9 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        spare = rows * columns - len(panels)  # cells that would be empty: the first panel is wider
        for index, draw in enumerate(panels):
            cell = (1, 1 + spare) if index == 0 else index + 1 + spare
            axes = figure.add_subplot(rows, columns, cell)
            draw(axes)
            axes.set_xlabel("step")
            axes.margins(x=0.01)
    return figure


def _panels(runs: Mapping[str, Metrics]) -> list[Callable[[Axes], None] | None]:
    return [
        _lines(runs, "Reward", {"reward/mean": "training reward", "eval/accuracy": "held-out accuracy"}),
        _lines(runs, "Loss", {"actor/loss": "training", "eval/nll": "held out"}),
        _lines(runs, "KL", {"mismatch/kl": "sampler to trainer", "actor/kl": "to reference"}, log=True),
        _lines(
            runs,
            "Response length, tokens",
            {"response_length/mean": "mean", "response_length/max": "longest"},
        ),
        _lines(runs, "Entropy, nats per token", {"actor/entropy": "entropy"}),
        _lines(runs, "Gradient norm", {"actor/grad_norm": "before clipping"}),
        _lines(
            runs,
            "Tokens per second",
            {
                "throughput/generated_tokens_per_second": "generated",
                "throughput/train_tokens_per_second": "trained",
            },
        ),
        _stack(next(iter(runs.values()))) if len(runs) == 1 else None,
    ]


def _points(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _lines(
    runs: Mapping[str, Metrics], title: str, names: Mapping[str, str], log: bool = False
) -> Callable[[Axes], None] | None:
    """Each metric of each run as a faint line and its running mean; evaluations as dots."""
    curves = []
    present = {
        name: label for name, label in names.items() if any(_points(m, name)[0] for m in runs.values())
    }
    for run, metrics in runs.items():
        for name, label in present.items():
            steps, values = _points(metrics, name)
            if steps:
                whole = label if len(runs) == 1 else run if len(present) == 1 else f"{run}: {label}"
                curves.append((name, whole, steps, values))
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        axes.set_title(title)
        for color, (name, label, steps, values) in zip(COLORS * len(curves), curves, strict=False):
            if name.startswith("eval/"):
                axes.plot(steps, values, "o-", color=color, markersize=4.5, linewidth=1.4, label=label)
                continue
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, _running_mean(values), color=color, linewidth=1.8, label=label)
        if log and all(value > 0 for *_, values in curves for value in values):
            axes.set_yscale("log")
        if len(curves) > 1:
            axes.legend()

    return draw


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a window of a twentieth of the curve, centred, cut at the ends."""
    half = max(1, len(values) // 40)
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _stack(metrics: Metrics) -> Callable[[Axes], None] | None:
    """Seconds of each phase, one above the other."""
    phases = [phase for phase in PHASES if any(line.get(f"time/{phase}") for line in metrics)]
    if not phases:
        return None

    def draw(axes: Axes) -> None:
        axes.set_title("Seconds per step, by phase")
        lines = [line for line in metrics if any(line.get(f"time/{phase}") is not None for phase in phases)]
        seconds = [[line.get(f"time/{phase}") or 0.0 for line in lines] for phase in phases]
        steps = [line["step"] for line in lines]
        axes.stackplot(steps, seconds, labels=phases, colors=COLORS, alpha=0.85, linewidth=0)
        axes.margins(y=0.3)
        axes.legend(ncols=3, loc="upper left")

    return draw
