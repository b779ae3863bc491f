"""Rollouts on disk: one Parquet file a step, one row a rollout.

Columns: ``step``, ``request_id``, ``prompt_id``, ``group_id``, ``index``, ``prompt``, ``response`` (texts),
``prompt_ids``, ``token_ids``, ``loss_mask``, ``rollout_log_probs``, ``policy_versions`` (lists),
``finish_reason``, ``reward``, ``rewards`` (map of name to value, null where it did not apply), ``valid``,
``columns`` (the row of the data, JSON) and ``extras`` (tensors by name: dtype, shape, bytes). Any Parquet
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

ROWS_PER_GROUP = 1024


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
    pq.write_table(_table(step, rollouts), temporary, compression="zstd", row_group_size=ROWS_PER_GROUP)
    temporary.replace(target)
    return target


def _table(step: int, rollouts: Sequence[Rollout]) -> pa.Table:
    import pyarrow as pa
    import torch

    prompt_ids = [torch.tensor(r.prompt.token_ids, dtype=torch.int64) for r in rollouts]
    extra = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.binary())])
    columns = {
        "step": pa.array([step] * len(rollouts), pa.int64()),
        "request_id": pa.array([r.request_id for r in rollouts], pa.string()),
        "prompt_id": pa.array([r.prompt.id for r in rollouts], pa.string()),
        "group_id": pa.array([r.group_id for r in rollouts], pa.int64()),
        "index": pa.array([r.index for r in rollouts], pa.int64()),
        "prompt": pa.array([r.prompt.text for r in rollouts], pa.string()),
        "response": pa.array([r.text for r in rollouts], pa.string()),
        "prompt_ids": _lists(prompt_ids, torch.int64),
        "token_ids": _lists([r.token_ids for r in rollouts], torch.int64),
        "loss_mask": _lists([r.loss_mask for r in rollouts], torch.bool),
        "rollout_log_probs": _lists([r.rollout_log_probs for r in rollouts], torch.float32),
        "policy_versions": _lists([r.policy_versions for r in rollouts], torch.int32),
        "finish_reason": pa.array([r.finish_reason for r in rollouts], pa.string()),
        "reward": pa.array([r.reward for r in rollouts], pa.float64()),
        "rewards": pa.array([list(r.rewards.items()) for r in rollouts], pa.map_(pa.string(), pa.float64())),
        "valid": pa.array([r.valid for r in rollouts], pa.bool_()),
        "columns": pa.array([json.dumps(r.prompt.columns, default=str) for r in rollouts], pa.string()),
        "extras": pa.array([_packed(r.extras) for r in rollouts], pa.map_(pa.string(), extra)),
    }
    return pa.table(columns)


def _lists(tensors: list[Tensor], dtype: Any) -> pa.ListArray:
    """One list a tensor, without a Python number a token."""
    import pyarrow as pa
    import torch

    flat = torch.cat([tensor.detach().cpu().to(dtype) for tensor in tensors] or [torch.zeros(0, dtype=dtype)])
    lengths = torch.tensor([0, *(len(tensor) for tensor in tensors)])
    return pa.LargeListArray.from_arrays(lengths.cumsum(0).numpy(), pa.array(flat.numpy()))


def _packed(extras: dict[str, Tensor]) -> list[tuple[str, dict[str, Any]]]:
    import torch

    rows = []
    for name, tensor in extras.items():
        flat = tensor.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes()  # also dtypes that NumPy has not
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, {"dtype": dtype, "shape": list(tensor.shape), "data": data}))
    return rows


def read_rollouts(path: Path) -> list[Rollout]:
    """Read a file that ``write_rollouts`` wrote.

    Raises:
        DataError: the file is absent, is no Parquet or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        near = sorted(file.name for file in path.parent.glob("*.parquet"))
        listed = f"{near[0]} to {near[-1]}" if near else "no rollout file"
        raise DataError(
            f"No rollouts at {path}. That folder holds {listed}; see tracking.rollouts_every_steps."
        )
    try:
        table = pq.read_table(path)
        return [_rollout(row) for row in _rows(table)]
    except (pa.ArrowInvalid, KeyError) as error:
        raise DataError(
            f"{path} is not a file of rollouts ({error}). Expected what 'engine generate' or a run writes."
        ) from error


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    arrays = {name: table[name].to_pylist() for name in table.column_names}
    return [dict(zip(arrays, values, strict=True)) for values in zip(*arrays.values(), strict=True)]


def _rollout(row: dict[str, Any]) -> Rollout:
    import torch

    prompt = Prompt(row["prompt_id"], row["prompt_ids"], row["prompt"], json.loads(row["columns"]))
    return Rollout(
        request_id=row["request_id"],
        prompt=prompt,
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
        extras={name: _unpacked(**packed) for name, packed in row["extras"]},
    )


def _unpacked(dtype: str, shape: list[int], data: bytes) -> Tensor:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise KeyError(f"unknown dtype '{dtype}'")
    if not data:
        return torch.zeros(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
