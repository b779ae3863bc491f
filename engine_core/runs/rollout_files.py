"""Rollouts on disk: one Parquet file per step, one row per rollout.

Columns: ``step``, ``request_id``, ``prompt_id``, ``group_id``, ``index``, ``prompt``, ``response`` (texts),
``prompt_ids``, ``token_ids``, ``loss_mask``, ``rollout_log_probs``, ``policy_versions`` (lists),
``finish_reason``, ``reward``, ``rewards`` (map of name to value, null if the reward does not apply),
``answers`` (map of reward to the answer that it read), ``greedy_reward``, ``valid``, ``failure`` (of an
episode), ``messages`` (of an episode: the messages after the prompt, JSON), ``columns`` (the row of the data,
JSON) and ``extras`` (tensors by name, as a safetensors file). Any Parquet reader can display them;
``read_rollouts`` returns the rollouts that ``write_rollouts`` wrote.

The key ``engine.rollouts`` of the file's metadata holds JSON: ``format`` (``FORMAT``) and the values that all rows
share, such as ``tokenizer`` (hash) and ``temperature``.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import faults
from engine_core.errors import DataError
from engine_core.types import TENSORS, Prompt, Rollout, sequences_of

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_core.runs.tracking import RunFolder

FORMAT = 3
ABOUT = b"engine.rollouts"
"""Key of the file's metadata."""
ROWS_AT_ONCE = 128
"""Rollouts of one row group: what must be decoded to read one of them."""
PLAIN = {
    "request_id": "string",
    "group_id": "int64",
    "index": "int64",
    "finish_reason": "string",
    "reward": "float64",
    "greedy_reward": "float64",
    "valid": "bool",
    "failure": "string",
}
"""Columns that are fields of a rollout, with their Arrow types."""
LACKED = re.compile(rb'"(BF16|F8_\w+)"')
"""Types of a safetensors file that numpy lacks."""


def rollout_path(folder: Path, step: int) -> Path:
    """Return the file of one step in a folder of rollouts."""
    return folder / f"step_{step:06d}.parquet"


def step_of(file: Path) -> int | None:
    """Return the step of a file of ``rollout_path``; None for a file of another name."""
    found = re.fullmatch(r"step_(\d+)\.parquet", file.name)
    return int(found[1]) if found else None


def write_rollouts(
    run: RunFolder | Path, step: int, rollouts: Sequence[Rollout], about: Mapping[str, Any] | None = None
) -> Path:
    """Write a file of rollouts atomically; a file of the same name is replaced.

    Args:
        run: a run, a folder of rollouts, or the file itself (``.parquet``).
        step: the step they belong to.
        rollouts: any number of rollouts, also none.
        about: plain values that all of them share: ``tokenizer`` (its hash), ``temperature``, ``top_p``, ``top_k``.

    Returns:
        The file.

    Raises:
        OSError: the file cannot be written. An older file is unchanged.
    """
    import pyarrow.parquet as pq

    path = run if isinstance(run, Path) else run.rollouts_dir
    target = path if path.suffix == ".parquet" else rollout_path(path, step)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    table = _table(step, sequences_of(rollouts)).replace_schema_metadata(
        {ABOUT: json.dumps({**(about or {}), "format": FORMAT})}
    )
    try:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROWS_AT_ONCE)
        faults.point("rollouts.half_written")
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return target


def read_rollouts(path: Path, arrays: bool = False) -> list[Rollout]:
    """Read a file that ``write_rollouts`` wrote; branches are put back into their rollouts.

    Args:
        path: the file.
        arrays: tensors are arrays of numpy, so that a display needs no torch; extras with a type that numpy lacks are left out.

    Raises:
        DataError: the file is missing, is not Parquet, lacks a column or has another format.
    """
    return with_branches(RolloutFile(path).rollouts(arrays=arrays))


def with_branches(rows: Iterable[Rollout]) -> list[Rollout]:
    """Return the rollouts of rows of a file; branches, which follow theirs, are put back into them."""
    found = list[Rollout]()
    for rollout in rows:
        last = found[-1] if found else rollout
        is_branch = rollout.request_id == f"{last.request_id}/{len(last.branches) + 1}"
        (last.branches if is_branch else found).append(rollout)
    return found


class RolloutFile:
    """A file of rollouts with access to any of its rows.

    Args:
        path: the file.

    Raises:
        DataError: the file is missing, is not Parquet, lacks a column or has another format.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path  #: the file
        if not path.is_file():
            near = sorted(file.name for file in path.parent.glob("*.parquet"))
            listed = f"{near[0]} to {near[-1]}" if near else "no rollout file"
            raise DataError(
                f"No rollouts at {path}. That folder holds {listed}; see tracking.rollouts_every_steps."
            )
        try:
            self._file = pq.ParquetFile(path)
            metadata = self._file.schema_arrow.metadata or {}
            #: plain values that all rollouts share
            self.about: dict[str, Any] = json.loads(metadata.get(ABOUT, f'{{"format": {FORMAT}}}'))
            version = int(self.about["format"])
        except (pa.ArrowInvalid, ValueError, TypeError, KeyError) as error:
            raise self._unreadable(error) from error
        if version != FORMAT:
            raise DataError(f"{path} is of format {version}; this version reads format {FORMAT}.")
        names = self._file.schema_arrow.names
        if missing := [name for name in _schema().names if name not in names]:
            raise self._unreadable(f"it has no column {', '.join(missing)}")
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = [0, *itertools.accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Return these columns of all rows."""
        return self._read(range(self._file.num_row_groups), columns)

    def rollouts(self, rows: Sequence[int] | None = None, arrays: bool = False) -> list[Rollout]:
        """Return the rollouts of these rows, in that order; default: all. ``arrays``: as for ``read_rollouts``.

        Raises:
            DataError: a value has another form than ``write_rollouts`` writes.
        """
        import pyarrow as pa
        from safetensors import SafetensorError

        wanted = range(len(self)) if rows is None else rows
        groups = sorted({bisect.bisect_right(self._starts, row) - 1 for row in wanted})
        held = [row for i in groups for row in range(self._starts[i], self._starts[i + 1])]
        place = {row: number for number, row in enumerate(held)}
        order = pa.array([place[row] for row in wanted], pa.int64())
        table = self._read(groups, _schema().names).take(order)
        try:
            return _rollouts(table, arrays)
        except (ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise self._unreadable(error) from error

    def _read(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        try:
            table = self._file.read_row_groups(list(groups), columns=list(columns))
            wanted = pa.schema([_schema().field(name) for name in columns])
            return table.select(list(columns)).cast(wanted)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, why: object) -> DataError:
        return DataError(
            f"{self.path} is not a file of rollouts ({why}). Expected what 'engine generate' or a run writes."
        )


@functools.cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    tokens = {name: pa.large_list(pa.type_for_alias(kind)) for name, kind in TENSORS.items()}
    columns = {
        "step": pa.int64(),
        **{name: pa.type_for_alias(kind) for name, kind in PLAIN.items()},
        **tokens,
        "prompt_id": pa.string(),
        "prompt": pa.string(),
        "prompt_ids": pa.large_list(pa.int64()),
        "columns": pa.string(),
        "response": pa.string(),
        "messages": pa.string(),
        "rewards": pa.map_(pa.string(), pa.float64()),
        "answers": pa.map_(pa.string(), pa.string()),
        "extras": pa.binary(),
    }
    return pa.schema(list(columns.items()))


def _table(step: int, rollouts: Sequence[Rollout]) -> pa.Table:
    import pyarrow as pa
    from safetensors.torch import save

    prompts = [r.prompt for r in rollouts]
    extras = [{name: tensor.contiguous().clone() for name, tensor in r.extras.items()} for r in rollouts]
    columns: dict[str, list[Any]] = {
        "step": [step] * len(rollouts),
        **{name: [getattr(r, name) for r in rollouts] for name in PLAIN},
        **{name: [getattr(r, name).numpy(force=True) for r in rollouts] for name in TENSORS},
        "prompt_id": [prompt.id for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "prompt_ids": [prompt.token_ids for prompt in prompts],
        "columns": [json.dumps(prompt.columns, default=str) for prompt in prompts],
        "response": [r.text for r in rollouts],
        "messages": [json.dumps(r.messages) for r in rollouts],
        "rewards": [list(r.rewards.items()) for r in rollouts],
        "answers": [list(r.answers.items()) for r in rollouts],
        "extras": [save(tensors) for tensors in extras],
    }
    return pa.table(columns, schema=_schema())


def _rollouts(table: pa.Table, arrays: bool) -> list[Rollout]:
    """Return the rows of a table as rollouts; token columns are not converted to Python numbers."""
    load: Any
    tensor: Any
    if arrays:
        from numpy import asarray as tensor
        from safetensors.numpy import load
    else:
        from safetensors.torch import load
        from torch import tensor

    plain = [name for name in table.column_names if name not in TENSORS]
    made = []
    for number, row in enumerate(table.select(plain).to_pylist()):
        tensors: dict[str, Any] = {
            name: tensor(table.column(name)[number].values.to_numpy(zero_copy_only=False)) for name in TENSORS
        }
        rollout = Rollout(
            **{name: row[name] for name in PLAIN},
            **tensors,
            prompt=Prompt(row["prompt_id"], row["prompt_ids"], row["prompt"], json.loads(row["columns"])),
            text=row["response"],
            rewards=dict(row["rewards"]),
            messages=json.loads(row["messages"]),
            answers=dict(row["answers"]),
            extras={} if arrays and LACKED.search(row["extras"]) else load(row["extras"]),
        )
        made.append(rollout)
    return made
