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
    from torch import Tensor

    from engine_core.tracking import RunFolder


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

    def column(kind: pa.DataType, values: list[Any]) -> pa.Array:
        return pa.array(values, kind)

    def lists(kind: pa.DataType, tensors: list[Tensor]) -> pa.Array:
        return pa.array([tensor.detach().cpu().numpy() for tensor in tensors], pa.large_list(kind))

    return pa.table(
        {
            "step": column(pa.int64(), [step] * len(rollouts)),
            "request_id": column(pa.string(), [r.request_id for r in rollouts]),
            "prompt_id": column(pa.string(), [r.prompt.id for r in rollouts]),
            "group_id": column(pa.int64(), [r.group_id for r in rollouts]),
            "index": column(pa.int64(), [r.index for r in rollouts]),
            "prompt": column(pa.string(), [r.prompt.text for r in rollouts]),
            "response": column(pa.string(), [r.text for r in rollouts]),
            "prompt_ids": column(pa.large_list(pa.int64()), [r.prompt.token_ids for r in rollouts]),
            "token_ids": lists(pa.int64(), [r.token_ids for r in rollouts]),
            "loss_mask": lists(pa.bool_(), [r.loss_mask for r in rollouts]),
            "rollout_log_probs": lists(pa.float32(), [r.rollout_log_probs for r in rollouts]),
            "policy_versions": lists(pa.int32(), [r.policy_versions for r in rollouts]),
            "finish_reason": column(pa.string(), [r.finish_reason for r in rollouts]),
            "reward": column(pa.float64(), [r.reward for r in rollouts]),
            "rewards": column(
                pa.map_(pa.string(), pa.float64()), [list(r.rewards.items()) for r in rollouts]
            ),
            "valid": column(pa.bool_(), [r.valid for r in rollouts]),
            "columns": column(pa.string(), [json.dumps(r.prompt.columns, default=str) for r in rollouts]),
            "extras": column(
                pa.binary(),
                [
                    save({name: tensor.contiguous().clone() for name, tensor in r.extras.items()})
                    for r in rollouts
                ],
            ),
        }
    )


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

    return Rollout(
        request_id=row["request_id"],
        prompt=Prompt(row["prompt_id"], row["prompt_ids"], row["prompt"], json.loads(row["columns"])),
        token_ids=torch.tensor(row["token_ids"], dtype=torch.int64),
        loss_mask=torch.tensor(row["loss_mask"], dtype=torch.bool),
        rollout_log_probs=torch.tensor(row["rollout_log_probs"], dtype=torch.float32),
        policy_versions=torch.tensor(row["policy_versions"], dtype=torch.int32),
        finish_reason=row["finish_reason"],
        group_id=row["group_id"],
        index=row["index"],
        text=row["response"],
        reward=row["reward"],
        rewards=dict(row["rewards"]),
        valid=row["valid"],
        extras=load(row["extras"]),
    )
