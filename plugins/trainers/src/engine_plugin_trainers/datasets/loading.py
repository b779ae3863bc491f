"""Read public data sets with the library ``datasets``: rows stay in its memory-mapped files."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError, DataError, EnvironmentProblem
from engine_plugin_trainers.datasets import conversion
from engine_plugin_trainers.datasets.conversion import Row, judged
from engine_plugin_trainers.datasets.table import SETS, PublicSet

log = logging.getLogger("engine")

BATCH_ROWS = 1000  # rows that are hashed at a time


class DatasetRows(Sequence[Row]):
    """The rows of a split, converted when they are read.

    Args:
        dataset: a ``datasets.Dataset``.
        chosen: the table's entry.
        suffix: text after each question.
        examples: converted rows that precede each question as worked examples.
        unpaired: two rows of each pair, the chosen response first.
    """

    def __init__(
        self,
        dataset: Any,
        chosen: PublicSet,
        suffix: str = "",
        examples: Sequence[Row] = (),
        unpaired: bool = False,
    ) -> None:
        self.dataset, self.chosen, self.suffix, self.unpaired = dataset, chosen, suffix, unpaired
        self.lead = "".join(
            f"Question: {self._question(row)}\nAnswer: {row['response']}\n\n" for row in examples
        )

    def __len__(self) -> int:
        return len(self.dataset) * (1 + self.unpaired)

    def __getitem__(self, index: Any) -> Any:
        if self.unpaired:
            return judged(self.chosen.convert(self.dataset[index // 2]), index % 2 == 0)
        row = self.chosen.convert(self.dataset[index])
        if self.chosen.reward:
            row["prompt"] = self._question(row)
            if self.lead:
                row["prompt"] = f"{self.lead}Question: {row['prompt']}\nAnswer:"
        return row

    def _question(self, row: Row) -> str:
        gap = " " if self.suffix and not self.suffix[0].isspace() else ""
        return f"{row['prompt']}{gap}{self.suffix}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the stored rows and of the texts that are added to each."""
        import pyarrow as pa

        state = hashlib.sha256(json.dumps([self.lead, self.suffix, self.unpaired]).encode())
        for table in self.dataset.with_format("arrow").iter(BATCH_ROWS):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            state.update(sink.getvalue())
        return state.hexdigest()


def rows_of(
    name: str,
    split: str,
    *,
    folder: str | None = None,
    revision: str = "",
    limit: int = 0,
    suffix: str | None = None,
    shots: int = 0,
    unpaired: bool = False,
) -> Sequence[Row]:
    """Return the rows of a split of a public data set; none if the set has no validation split.

    Args:
        name: a name of ``SETS``.
        split: ``train`` or ``validation``.
        folder: a folder with the files of the hub repository; None: the hub.
        revision: a commit, tag or branch of the hub repository; empty: the table's.
        limit: maximum number of rows; 0: all.
        suffix: text after each question; None: the table's.
        shots: number of worked examples before each question.
        unpaired: make two rows of each pair.

    Raises:
        ConfigError: the options contradict each other or the set.
        DataError: the set cannot be read, or has other columns than expected.
        EnvironmentProblem: the library ``datasets`` is not installed.
    """
    chosen = SETS[name]
    if folder and revision:
        raise ConfigError(
            f"revision: got '{revision}', but folder names files that are used as they "
            "are. Remove one of the two keys."
        )
    if split == "train" and not chosen.train:
        others = ", ".join(other for other, found in SETS.items() if found.train and found.reward)
        raise DataError(
            f"{chosen.repo} has no training split, it is for evaluation. "
            f"Sets of questions to train on: {others}."
        )
    if split == "validation" and not chosen.validation:
        return []
    dataset = open_split(name, split, folder, revision)
    examples = _examples(name, shots, folder, revision) if shots else []
    first = len(examples) if split == "train" else 0
    last = min(len(dataset), first + limit) if limit else len(dataset)
    dataset = dataset.select(range(first, last))
    suffix = chosen.suffix if suffix is None else suffix
    return DatasetRows(dataset, chosen, suffix, examples, unpaired)


def open_split(name: str, split: str, folder: str | None = None, revision: str = "") -> Any:
    """Return a split as a ``datasets.Dataset``, without the rows that cannot be used.

    Raises:
        DataError: it cannot be read, or has other columns than expected.
        EnvironmentProblem: the library ``datasets`` is not installed.
    """
    chosen = SETS[name]
    hub_split = chosen.train if split == "train" else chosen.validation
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            f"'{name}' needs the library 'datasets': {error}. "
            "Try: pip install 'engine-plugin-trainers[datasets]'"
        ) from error
    place = f"folder '{folder}'" if folder else f"{chosen.repo} on the hub"
    try:
        dataset = load_dataset(
            folder or chosen.repo,
            chosen.config,
            split=hub_split,
            revision=None if folder else revision or chosen.revision,
            cache_dir=_cache_of(folder) if folder else None,
        )
    except Exception as error:  # of many libraries: HTTP clients, file formats, the hub's client
        raise DataError(
            f"the split '{hub_split}' of {place} cannot be read: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. {_advice(chosen, folder)}"
        ) from error
    if folder or revision:
        found = (commit_of(folder) or "unknown") if folder else revision
        log.info("Data source '%s' (%s) is read from %s, revision %s.", name, split, place, found)
    if missing := [column for column in chosen.columns if column not in dataset.column_names]:
        raise DataError(
            f"{place} lacks the columns {', '.join(missing)}. Expected the columns "
            f"{', '.join(chosen.columns)}; found {', '.join(dataset.column_names)}."
        )
    return _usable(dataset, name, split)


def commit_of(folder: str) -> str:
    """Return the commit that ``hf download`` has recorded for all files of a folder; empty without one, or with several."""
    records = Path(folder, ".cache", "huggingface", "download").rglob("*.metadata")
    commits = {record.read_text("utf-8").partition("\n")[0] for record in records}
    return commits.pop() if len(commits) == 1 else ""


def _usable(dataset: Any, name: str, split: str) -> Any:
    """Return the rows that can be used. The library's cache keeps the result until the code that decides changes."""
    from datasets.fingerprint import Hasher

    if not (usable := SETS[name].usable):
        return dataset
    fingerprint = Hasher.hash([dataset._fingerprint, usable.__name__, inspect.getsource(conversion)])
    kept = dataset.filter(usable, new_fingerprint=fingerprint)
    if left_out := len(dataset) - len(kept):
        log.info("Data source '%s' (%s): %d of %d rows cannot be used.", name, split, left_out, len(dataset))
    return kept


def _cache_of(folder: str) -> str:
    """Return the cache of these files. The library's own would return other files of a folder of the same name."""
    from datasets import config

    files = [(path, path.stat()) for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    state = [(str(path.relative_to(folder)), found.st_size, found.st_mtime_ns) for path, found in files]
    return str(
        Path(config.HF_DATASETS_CACHE, "folders", hashlib.sha256(json.dumps(state).encode()).hexdigest())
    )


def _advice(chosen: PublicSet, folder: str | None) -> str:
    download = f"hf download {chosen.repo} --repo-type dataset --local-dir FOLDER"
    if folder:
        return f"It must hold the files of {chosen.url}, as `{download}` writes them."
    return (
        f"Where the hub cannot be reached, name in the option 'folder' (engine data and engine eval: --source) a copy that `{download}` "
        "has written."
    )


def _examples(name: str, shots: int, folder: str | None, revision: str) -> list[Row]:
    """Return the first ``shots`` rows of the training split, converted.

    Raises:
        ConfigError: the set has no training split with solutions, or fewer rows.
    """
    chosen = SETS[name]
    rows = []
    if chosen.train:
        train = open_split(name, "train", folder, revision)
        rows = [chosen.convert(train[number]) for number in range(min(shots, len(train)))]
    usable = [row for row in rows if row.get("response")]
    if len(usable) < shots:
        raise ConfigError(
            f"shots: got {shots}, but the training split of {chosen.repo} has {len(usable)} worked "
            "solutions at its start. Set 0."
        )
    return usable
