"""Rows that come from no file: those given from Python, and those of a data source, ``[data] source = "NAME"``.

A trainer calls ``rows_of`` in ``make_source``, and ``evaluated`` and ``rows_of`` in ``evaluate``. The function of the
source is called once for each split, before any model is built.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.data.rows import MemoryRows
from engine_core.errors import DataError, PluginError

if TYPE_CHECKING:
    from engine_core.config.evaluation import HeldOut
    from engine_core.train.run import TrainingRun

log = logging.getLogger("engine")


def rows_of(run: TrainingRun, held_out: HeldOut | None = None) -> Any:
    """Return the rows that a trainer reads in place of files; None if it reads files.

    Args:
        run: the trainer.
        held_out: the set to evaluate; None: the rows to train on.

    Raises:
        PluginError: the function of the data source failed, or returned no sequence of dicts.
        DataError: it returned no rows to train on, or none for the only set to evaluate.
    """
    if held_out is None and "data" in run.live:
        return run.live["data"]
    if not run.config.data.source or (held_out is not None and _has_files(held_out)):
        return None
    kept: dict[str, MemoryRows] = vars(run).setdefault("_source_rows", {})
    split = "train" if held_out is None else "validation"
    if split not in kept:
        kept[split] = _read(run, split)
        if split == "train" and run.config.eval.during_training:
            evaluated(run)  # held-out rows that cannot be used are refused now, not at the first evaluation
    return kept[split]


def evaluated(run: TrainingRun) -> list[HeldOut]:
    """Return the sets to evaluate in this step, without the set of a data source that has no held-out rows.

    Raises:
        DataError: no set is left.
    """
    if sets := [each for each in run.held_out() if _has_files(each) or len(rows_of(run, each))]:
        return sets
    at = f"data.source = '{run.config.data.source}' has no rows for the split 'validation'"
    raise DataError(f"{at}: name files in data.validation, or evaluate nothing (eval.every_steps = 0).")


def place_of_rows(run: TrainingRun) -> str:
    """Return where the training rows come from, for messages: a key of the run file, or "the argument data"."""
    key = "data.source" if run.config.data.source else "data.train"
    return "the argument data" if "data" in run.live else key


def _has_files(held_out: HeldOut) -> bool:
    return bool(held_out.name) or any(held_out.path)  # the set of `data.validation` alone may have none


def _read(run: TrainingRun, split: str) -> MemoryRows:
    """Call the function of the data source for a split and check every row.

    Raises:
        PluginError: the function failed, or returned no sequence of dicts.
        DataError: the split ``train`` has no rows.
    """
    name, options = run.config.data.source, run.config.data.options
    spec, plugin = run.plugins.chosen["data_sources", name]
    function, digest = run.plugins.function("data_sources", name), hashlib.sha256()
    about = [f"{key} {value}" for key in ("license", "revision", "url") if (value := getattr(spec, key))]
    if split == "train":
        log.info("Data source '%s' of %s: %s.", name, plugin.label, ", ".join(about) or "no license is named")

    def read() -> Any:
        """Return the rows, each checked and added to the digest; raise PluginError for another type."""
        rows = function(split, **(options.model_dump() if options else {}))
        wrong = type(rows).__name__ if isinstance(rows, Mapping) or not hasattr(rows, "__len__") else ""
        for number in range(0 if wrong else len(rows)):
            if not isinstance(row := rows[number], dict):
                wrong = wrong or f"{type(row).__name__} as row {number}"
            digest.update(json.dumps(row, default=str, skipkeys=True).encode())
        if wrong:
            raise PluginError(f"{plugin.label} must return a sequence of dicts, got {wrong}.")
        return rows

    try:
        rows = run.plugins.guarded("data_sources", name, read)()  # rows may be computed as they are read
    except PluginError as error:
        raise PluginError(f"data.source = '{name}', split '{split}': {error}") from error
    if split == "train" and not len(rows):
        raise DataError(f"data.source = '{name}': {plugin.label} returned no rows for the split 'train'.")
    made = MemoryRows(rows, f"data source '{name}' ({split})")
    made.digest = digest.hexdigest()
    return made


def environment_tools(run: TrainingRun) -> Sequence[Mapping[str, Any]]:
    """Return the JSON schemas of the tools that the environment declares."""
    config = run.config.environment
    spec: Any = config and run.plugins.spec("environments", config.name)
    return spec.tools if spec else ()
