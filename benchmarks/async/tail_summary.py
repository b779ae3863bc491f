"""What the metrics of ``long_tails.py`` come to, and their table."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

PHASES = ("generate", "reward", "log_probs", "train", "sync", "sampling")
TOLD = (
    "mismatch/mean_abs",
    "async/staleness_mean",
    "async/staleness_max",
    "async/mixed_version_share",
    "async/ready_groups",
    "async/groups_in_flight",
    "throughput/generated_tokens_per_second",
    "response_length/mean",
    "response_length/max",
    "stream/overlap_share",
    "time/stream_update",
    "sync/bytes",
)
COUNTED = (
    "async/out_of_order_groups", "async/aborted", "async/kept_tokens", "async/resampled", "filter/dropped",
    "sampling/resumed_groups", "sampling/stale_groups",
)  # fmt: skip


def summary(lines: list[dict[str, float]], first: int, last: int) -> dict[str, Any]:
    """Of the steps ``first`` to ``last``, as far as they came; the rate is steps by elapsed time, not by a median.

    Ahead, steps are uneven: one that waits for a tail is followed by quick ones.
    """
    counted = [line for line in lines if first <= line["step"] <= last]
    found: dict[str, Any] = {
        "steps": [line["time/step"] for line in lines],
        "first_counted": first,
        "counted": len(counted),
    }
    if not counted:
        return found
    seconds = sum(line["time/step"] for line in counted)
    found |= {
        "steps_per_s": len(counted) / seconds,
        "step_s_median": statistics.median(line["time/step"] for line in counted),
        "tokens_per_s": sum(line["tokens/generated"] for line in counted) / seconds,
    }
    for name in (*(f"time/{phase}" for phase in PHASES), *TOLD):
        if values := [line[name] for line in counted if name in line]:
            found[name] = max(values) if name.endswith("max") else statistics.mean(values)
    found |= {name: sum(line[name] for line in counted) for name in COUNTED if name in counted[0]}
    return found


def of_sync(one: dict[str, Any], sync: dict[str, Any] | None) -> float | None:
    """The rate of a case over that in turn, in the steps that count in both: steps differ by their longest response."""
    if sync is None:
        return None
    first = max(one["first_counted"], sync["first_counted"]) - 1
    last = min(len(one["steps"]), len(sync["steps"]))
    return sum(sync["steps"][first:last]) / sum(one["steps"][first:last]) if last > first else None


def show(out: Path) -> None:
    """A table of every case that lies in a folder, and how each compares to the one in turn of as many GPUs.

    ``stream`` is compared to ``pools``, which has the same GPUs for each.
    """
    found = [json.loads(file.read_text()) for file in sorted(out.glob("long_tails_*_*.json"))]
    base = {(one["gpus"], one["case"]): one for one in found if one.get("counted")}
    print(
        "| GPUs | case | steps | steps/s | of sync (stream: of pools), same steps | tokens/s | median step s | staleness | mismatch | ended |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for one in found:
        if not one.get("counted"):
            print(f"| {one['gpus']} | {one['case']} | 0 | | | | | | | {one['ended']} |")
            continue
        ratio = of_sync(one, base.get((one["gpus"], "pools" if one["case"] == "stream" else "sync")))
        print(
            f"| {one['gpus']} | {one['case']} | {one['counted']} | {one['steps_per_s']:.4f} | "
            f"{'' if ratio is None else f'{ratio:.2f}x'} | {one['tokens_per_s']:,.0f} | {one['step_s_median']:.2f} | "
            f"{one.get('async/staleness_mean', 0):.2f} | {one.get('mismatch/mean_abs', 0):.4f} | {one['ended']} |"
        )
