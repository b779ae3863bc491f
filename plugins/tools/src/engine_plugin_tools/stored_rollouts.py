"""The stored rollouts of a run as plain values for its page: histograms of each step, and a bounded part of the texts."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine_core.runs.rollout_files import RolloutFile, step_of
from engine_plugin_tools.transcripts import transcript

if TYPE_CHECKING:
    import pyarrow as pa

STEPS, ENDS, SAMPLE, CHARACTERS = 100, 512, 8, 6000
LIMITS = (
    f"The page holds at most {STEPS} stored steps of each set, spread over the run: up to {ENDS} completions of the first and the last "
    f"one, {SAMPLE} of each other one, spread over the rewards. Texts over {CHARACTERS:,} characters are cut in the middle. "
    "`engine inspect rollouts RUN --step N` shows all."
)
BINS = 24
MEASURED = ["request_id", "group_id", "reward", "token_ids", "prompt_ids"]
SHOWN = ["prompt_id", "index", "prompt", "response", "messages", "rewards", "answers", "finish_reason", "valid", "failure", "columns"]  # fmt: skip
OF_TURNS = ["extras", "loss_mask", "policy_versions"]


def stored_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return the training rollouts and those of each held-out set, each with its steps.

    Args:
        folder: the folder ``rollouts`` of a run.

    Raises:
        DataError: a file is not one of rollouts.
    """
    held_out = sorted({file.parent for file in (folder / "eval").rglob("step_*.parquet")})
    sets = {"training": folder} | {
        " ".join(("held-out", *path.relative_to(folder / "eval").parts)): path for path in held_out
    }
    found = ((name, _set(path, name == "training")) for name, path in sets.items())
    return [{"name": name, **each} for name, each in found if each["steps"]]


def _set(folder: Path, training: bool) -> dict[str, Any]:
    files = sorted(file for file in folder.glob("step_*.parquet") if step_of(file) is not None)
    stride, chosen = 1, files
    while len(chosen) > STEPS:  # doubled, so that most steps stay when a running run stores more
        stride *= 2
        chosen = list(dict.fromkeys([*files[::stride], files[-1]]))
    steps = [
        _step(file, ENDS) if file in (files[0], files[-1]) else dict(_sample(file, file.stat().st_mtime_ns))
        for file in chosen
    ]
    values: dict[str, list[list[float]]] = {}
    for kind in ("reward", "length", "advantage")[: 3 if training else 2]:
        values[kind] = [[v for v in step[kind] if math.isfinite(v)] for step in steps]
    ranges = {kind: _range([v for each in of_steps for v in each]) for kind, of_steps in values.items()}
    for number, step in enumerate(steps):
        for kind in ("reward", "length", "advantage"):
            step.pop(kind)
        step["histograms"] = {kind: _histogram(values[kind][number], *ranges[kind]) for kind in values}
    return {"stored": len(files), "ranges": ranges, "steps": steps}


@functools.lru_cache(maxsize=512)
def _sample(path: Path, changed: int) -> dict[str, Any]:
    return _step(path, SAMPLE)


def _step(path: Path, most: int) -> dict[str, Any]:
    """Return a step: what is measured of all its rollouts, and at most ``most`` of them with their texts."""
    file = RolloutFile(path)
    table = file.table(MEASURED)
    ids: list[str] = table.column("request_id").to_pylist()
    branches: dict[int, int] = {}  # rows of the rollouts, with the number of branches, which follow them
    for row, name in enumerate(ids):
        last = next(reversed(branches), None)
        if last is not None and name == f"{ids[last]}/{branches[last] + 1}":
            branches[last] += 1
        else:
            branches[row] = 0
    main = list(branches)
    whole, prompts = (table.column(name).combine_chunks().value_lengths() for name in MEASURED[3:])
    lengths = [whole[row].as_py() - prompts[row].as_py() for row in main]
    stored, stored_groups = table.column("reward").to_pylist(), table.column("group_id").to_pylist()
    rewards = [math.nan if stored[row] is None else stored[row] for row in main]
    groups = [stored_groups[row] for row in main]
    order = sorted(range(len(main)), key=lambda i: (rewards[i], i))
    count = min(most, len(order))
    chosen = sorted(order[round(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count))
    rows = _completions(file, [main[i] for i in chosen]) if chosen else []
    for shown, i in zip(rows, chosen, strict=True):
        shown |= {"reward": _plain(rewards[i]), "tokens": lengths[i], "group": groups[i]}
        if branches[main[i]]:
            shown["branches"] = branches[main[i]]
    return {
        "step": step_of(path),
        "count": len(main),
        "rows": rows,
        "reward": rewards,
        "length": lengths,
        "advantage": _above_group(rewards, groups),
    }


def _above_group(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Return each reward minus the mean of its group."""
    sums: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        sums.setdefault(group, []).append(reward)
    means = {group: sum(each) / len(each) for group, each in sums.items()}
    return [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]


def _rows(file: RolloutFile, columns: Sequence[str], rows: Sequence[int]) -> pa.Table:
    """Return some rows as slices; ``Table.take`` imports pandas to read the row numbers."""
    import pyarrow as pa

    table = file.table(columns)
    return pa.concat_tables([table.slice(row, 1) for row in rows])


def _completions(file: RolloutFile, rows: Sequence[int]) -> list[dict[str, Any]]:
    table = _rows(file, SHOWN, rows)
    episodes = any(text != "[]" for text in table.column("messages").to_pylist())
    turns = _rows(file, OF_TURNS, rows) if episodes else None
    found = []
    for number, row in enumerate(table.to_pylist()):
        answer = json.loads(row["columns"]).get("answer")
        messages = json.loads(row["messages"])
        shown = {
            "id": f"{row['prompt_id']} #{row['index']}",
            "prompt": _cut(row["prompt"]),
            "finish": row["finish_reason"],
            "rewards": {name: _plain(value) for name, value in row["rewards"]},
        }
        if messages and turns is not None:
            shown["turns"] = _episode(messages, row["response"], turns, number)
        else:
            shown["response"] = _cut(row["response"])
        extra = {
            "answer": None if answer is None else _cut(str(answer)),
            "read": {name: _cut(text) for name, text in row["answers"] if text},
            "failure": row["failure"],
            "dropped": not row["valid"],
        }
        found.append(shown | {name: value for name, value in extra.items() if value})
    return found


def _episode(messages: list[Any], text: str, table: pa.Table, row: int) -> list[dict[str, str]]:
    import numpy as np
    from safetensors.numpy import load

    # `to_numpy` of pyarrow imports pandas
    extras, mask, versions = (table.column(name)[row].as_py() for name in OF_TURNS)
    # numpy arrays have the few methods of tensors that a transcript needs
    rollout: Any = SimpleNamespace(
        messages=messages,
        text=text,
        extras=load(extras),
        loss_mask=np.array(mask, bool),
        policy_versions=np.array(versions, int),
    )
    return [
        {"role": entry.role, "text": _cut(entry.text), "note": entry.note} for entry in transcript(rollout)
    ]


def _cut(text: str) -> str:
    left_out = len(text) - CHARACTERS
    if left_out <= 0:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[-half:]}"


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _histogram(values: Sequence[float], low: float, high: float) -> list[int]:
    counts = [0] * BINS
    for value in values:
        counts[min(int((value - low) / (high - low) * BINS), BINS - 1)] += 1
    return counts
