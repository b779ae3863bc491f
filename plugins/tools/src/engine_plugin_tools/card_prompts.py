"""Decide whether a run rendered its prompts with the chat template, for the examples of a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.inputs import files_of
from engine_core.data.layouts import convert, detect
from engine_core.data.rows import BadRow, Rows
from engine_core.errors import DataError

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.runs.tracking import RunFolder

QUESTION = {"role": "user", "content": "Tom has 12 apples and eats 5. How many are left?"}
"""The prompt of the examples."""


def uses_template(run: RunFolder, config: EngineConfig) -> bool:
    """Return whether the run rendered prompts with the tokenizer's chat template, if the tokenizer has one.

    Without `data.chat_template`, a stored rollout decides, else the first row of a training file. If neither exists,
    the answer is True.
    """
    if config.data.chat_template is not None:
        return config.data.chat_template
    stored = max(run.rollouts_dir.glob("step_*.parquet"), default=None)
    if stored and (rollout := _first_row(stored, ["columns"])):
        return "messages" in json.loads(rollout["columns"])
    files = (Path(file) for part in config.data.parts for file in files_of(part.path))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return True
    data = config.data
    try:
        row = _first_row(file) if file.suffix == ".parquet" else Rows([str(file)]).row(0)
        layout = detect(row, data.columns) if data.format == "auto" else data.format
        return not isinstance(convert(row, layout, data.columns, learn=False).prompt, str)
    except (BadRow, DataError):  # a layout that only its trainer reads, or a file that changed since
        return True


def _first_row(file: Path, columns: Sequence[str] | None = None) -> Mapping[str, Any]:
    """Return the first row of a Parquet file; {} if it has none."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        batch = next(opened.iter_batches(1, columns=columns), None)
        return batch.to_pylist()[0] if batch else {}
