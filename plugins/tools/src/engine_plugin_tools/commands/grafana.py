"""``engine grafana``: a dashboard for the tracker ``prometheus``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_core.cli.output import print_json
from engine_plugin_tools.output_files import write_output
from engine_plugin_tools.trackers import gauge_name

PANELS = {
    "Reward": ("reward/mean", "eval/accuracy"),
    "Loss": ("actor/loss", "critic/loss"),
    "KL and entropy": ("actor/kl", "actor/approx_kl", "actor/entropy"),
    "Clipped tokens": ("actor/clip_fraction",),
    "Gradient norm": ("actor/grad_norm",),
    "Learning rate": ("actor/lr",),
    "Sampler against trainer": ("mismatch/kl", "mismatch/mean_abs"),
    "Response length": ("response_length/mean", "response_length/max"),
    "Truncated responses": ("response_length/truncated_share",),
    "Seconds of a step": ("time/step", "time/generate", "time/reward", "time/train", "time/sync"),
    "Tokens a second": (
        "throughput/generated_tokens_per_second",
        "throughput/train_tokens_per_second",
    ),
    "Step": ("step",),
}
"""Title of a panel -> its metrics."""


def grafana(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the dashboard there; default: stdout."),
    ] = None,
) -> None:
    """Write a Grafana dashboard (JSON) of the metrics that the tracker prometheus offers; import it in Grafana.

    Example: engine grafana --out dashboard.json
    """
    if out is None:
        print_json(dashboard())
    else:
        write_output(out, json.dumps(dashboard(), indent=2))
        print(out)


def dashboard() -> dict[str, Any]:
    """Return the dashboard, which asks for a Prometheus data source and for runs."""
    source = {"type": "prometheus", "uid": "${source}"}
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": source,
            "query": "label_values(engine_step, run)",
            "multi": True,
            "includeAll": True,
            "refresh": 2,
        },
    ]
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
            "targets": [
                {
                    "refId": chr(ord("A") + i),
                    "expr": f'{gauge_name(name)}{{run=~"$run"}}',
                    "legendFormat": f"{{{{run}}}} {name}",
                }
                for i, name in enumerate(metrics)
            ],
        }
        for number, (title, metrics) in enumerate(PANELS.items())
    ]
    return {
        "title": "Engine",
        "uid": "engine-core-rl",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
