"""Rollouts on disk: one Parquet file a step, one row a rollout.

Columns: ``step``, ``request_id``, ``prompt_id``, ``group_id``, ``index``, ``prompt``, ``response`` (texts),
``prompt_ids``, ``token_ids``, ``loss_mask``, ``rollout_log_probs``, ``policy_versions`` (lists),
``finish_reason``, ``reward``, ``rewards`` (map of name to value, null where it did not apply), ``valid``,
``columns`` (the row of the data, JSON) and ``extras`` (tensors by name, as a safetensors file). Any Parquet
reader shows them; ``read_rollouts`` rebuilds what ``write_rollouts`` was given.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError
from engine_core.types import Prompt, Rollout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from engine_core.tracking import RunFolder


PLAIN = {
    "request_id": "string",
    "group_id": "int64",
    "index": "int64",
    "finish_reason": "string",
    "reward": "float64",
    "valid": "bool",
}
"""Columns that are fields of a rollout, with their Arrow types."""
TENSORS = {
    "token_ids": "int64",
    "loss_mask": "bool",
    "rollout_log_probs": "float32",
    "policy_versions": "int32",
}
"""Fields with a value a token, with the name of the type in Arrow and in torch."""


def rollout_path(folder: Path, step: int) -> Path:
    """The file of one step in a folder of rollouts."""
    return folder / f"step_{step:06d}.parquet"


def write_rollouts(run: RunFolder | Path, step: int, rollouts: Sequence[Rollout]) -> Path:
    """Write rollouts whole or not at all; a file of the same name is replaced.

    Args:
        run: a run, a folder of rollouts, or the file itself (``.parquet``).
        step: the step they belong to.
        rollouts: any number of them, none included.

    Returns:
        The file.
    """
    import pyarrow.parquet as pq

    path = run if isinstance(run, Path) else run.rollouts_dir
    target = path if path.suffix == ".parquet" else rollout_path(path, step)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    pq.write_table(_table(step, rollouts), temporary, compression="zstd", row_group_size=1024)
    temporary.replace(target)
    return target


def _table(step: int, rollouts: Sequence[Rollout]) -> pa.Table:
    import pyarrow as pa
    from safetensors.torch import save

    def lists(values: list[Any], kind: str) -> pa.Array:
        return pa.array(values, pa.large_list(pa.type_for_alias(kind)))

    prompts = [r.prompt for r in rollouts]
    numbers = pa.map_(pa.string(), pa.float64())
    extras = [{name: tensor.contiguous().clone() for name, tensor in r.extras.items()} for r in rollouts]
    columns = {
        "step": pa.array([step] * len(rollouts), "int64"),
        **{name: pa.array([getattr(r, name) for r in rollouts], kind) for name, kind in PLAIN.items()},
        **{
            name: lists([getattr(r, name).numpy(force=True) for r in rollouts], kind)
            for name, kind in TENSORS.items()
        },
        "prompt_id": pa.array([prompt.id for prompt in prompts], "string"),
        "prompt": pa.array([prompt.text for prompt in prompts], "string"),
        "prompt_ids": lists([prompt.token_ids for prompt in prompts], "int64"),
        "columns": pa.array([json.dumps(prompt.columns, default=str) for prompt in prompts], "string"),
        "response": pa.array([r.text for r in rollouts], "string"),
        "rewards": pa.array([list(r.rewards.items()) for r in rollouts], numbers),
        "extras": pa.array([save(tensors) for tensors in extras], "binary"),
    }
    return pa.table(columns)


def read_rollouts(path: Path) -> list[Rollout]:
    """Read a file that ``write_rollouts`` wrote.

    Raises:
        DataError: the file is absent, is no Parquet or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors import SafetensorError

    if not path.is_file():
        near = sorted(file.name for file in path.parent.glob("*.parquet"))
        listed = f"{near[0]} to {near[-1]}" if near else "no rollout file"
        raise DataError(
            f"No rollouts at {path}. That folder holds {listed}; see tracking.rollouts_every_steps."
        )
    try:
        return [_rollout(row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowInvalid, KeyError, SafetensorError) as error:
        raise DataError(
            f"{path} is not a file of rollouts ({error}). Expected what 'engine generate' or a run writes."
        ) from error


def _rollout(row: dict[str, Any]) -> Rollout:
    import torch
    from safetensors.torch import load

    tensors: dict[str, Any] = {
        name: torch.tensor(row[name], dtype=getattr(torch, kind)) for name, kind in TENSORS.items()
    }
    return Rollout(
        **{name: row[name] for name in PLAIN},
        **tensors,
        prompt=Prompt(row["prompt_id"], row["prompt_ids"], row["prompt"], json.loads(row["columns"])),
        text=row["response"],
        rewards=dict(row["rewards"]),
        extras=load(row["extras"]),
    )
