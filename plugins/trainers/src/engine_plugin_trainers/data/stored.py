"""Stored rollouts as training data: whole groups from the files that runs and ``engine generate`` write.

All files are checked before any model is built: columns, the tokenizer that the files name, token ids, lengths,
log-probs, rewards. After that only the groups of a step are read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.inputs import files_of, stored_files
from engine_core.data.source import Outcome, Source
from engine_core.errors import DataError
from engine_core.runs.rollout_files import RolloutFile, with_branches
from engine_core.types import TENSORS

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_core.config.models import DataConfig
    from engine_core.types import Rollout

logger = logging.getLogger("engine")

OPEN_FILES = 16
NOT_GREEDY = (
    "greedy_reward is missing, here and in all rows, which algorithm.advantage needs: the run that sampled them sampled "
    "no greedy responses. Use another estimator."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """The properties of the run that stored rollouts must fit.

    Args:
        tokenizer: hash of the run's tokenizer.
        vocabulary: exclusive upper bound of token ids.
        temperature: the run's sampling temperature.
        greedy: the algorithm needs ``greedy_reward``.
    """

    tokenizer: str
    vocabulary: int
    temperature: float
    greedy: bool = False


class StoredGroups(Source[Any]):
    """A source of groups of stored rollouts in a seeded order; an item is the list of a group's rollouts.

    Args:
        config: ``[data]``; `train` names files, folders of files, and runs.
        seed: seed of the order.
        fit: the properties that the rollouts must fit.

    Raises:
        DataError: a file does not fit; the message names it.
    """

    def __init__(self, config: DataConfig, seed: int, fit: Fit) -> None:
        super().__init__(_Preparer(_Rows(_files(config), fit), config), seed)  # type: ignore[arg-type]

    def columns(self) -> set[str]:
        """Return no columns: stored rollouts have their rewards."""
        return set()


@dataclasses.dataclass
class _Preparer:
    """A preparer whose item is a stored group."""

    rows: _Rows
    config: DataConfig

    def prepare(self, index: int) -> Outcome:
        """Read group number ``index``."""
        return Outcome("ok", self.rows.group(index))


class _Rows:
    """The groups of all files, numbered from 0; ``files`` has the rows of each group, file by file."""

    paths: Sequence[Path] = ()  # other processes prepare nothing ahead

    def __init__(self, paths: Sequence[Path], fit: Fit) -> None:
        self._paths, self.files = paths, [_checked(path, fit) for path in paths]
        self._places = [(path, rows) for path, file in zip(paths, self.files, strict=True) for rows in file]
        self.parts = [(1.0, range(len(self)))]  # no mix
        self._open = functools.lru_cache(maxsize=OPEN_FILES)(RolloutFile)

    def __len__(self) -> int:
        return len(self._places)

    def group(self, index: int) -> list[Rollout]:
        """Read the rollouts of group number ``index``, with their branches."""
        path, rows = self._places[index]
        return with_branches(self._open(path).rollouts(rows))

    def fingerprint(self) -> list[dict[str, Any]]:
        """Return name, number of groups and SHA-256 of each file."""
        prints = []
        for path, file in zip(self._paths, self.files, strict=True):
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            prints.append({"file": f"{path.parent.name}/{path.name}", "rows": len(file), "sha256": digest})
        return prints


def _files(config: DataConfig) -> list[Path]:
    """Return the files that ``data.train`` names, without files that have no rollouts.

    Raises:
        DataError: an entry has no rollouts, or a file is named twice.
    """
    found: list[Path] = []
    for entry in map(Path, files_of(config.train)):
        files = list(stored_files(entry))
        held = [file for file in files if len(RolloutFile(file))]
        if not held:
            raise DataError(f"data.train: '{entry}' holds no rollouts. Expected a file or folder with some.")
        for file in (file for file in files if file not in held):
            logger.info("Left out: %s has no rollouts (all groups of that step were dropped).", file)
        found += held
    if twice := [file for file, count in collections.Counter(found).items() if count > 1]:
        raise DataError(f"data.train: '{twice[0]}' is named twice. Name each file once.")
    return found


def _checked(path: Path, fit: Fit) -> list[list[int]]:
    """Return the rows of each group of a file.

    Raises:
        DataError: the file does not fit the run.
    """
    file = RolloutFile(path)
    about = file.about
    if about.get("tokenizer", fit.tokenizer) != fit.tokenizer:
        raise DataError(
            f"{path}: its rollouts were sampled with another tokenizer, so their token ids mean something else. "
            "Set model.tokenizer to that of the run that sampled them."
        )
    if "tokenizer" not in about:
        logger.warning("%s does not name the tokenizer that it was sampled with: its ids are trusted.", path)
    if about.get("temperature", fit.temperature) != fit.temperature:
        logger.warning(
            "%s was sampled at temperature %s; the policy that is trained has rollout.temperature = %s.",
            path, about["temperature"], fit.temperature,
        )  # fmt: skip
    table = file.table([*TENSORS, "prompt_ids", "group_id", "reward", "valid", "greedy_reward"])
    for row, wrong in itertools.islice(_wrong(table, fit), 1):
        raise DataError(f"{path}, row {row}: {wrong}")
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(table["group_id"].to_pylist()):
        groups.setdefault(number, []).append(row)
    return list(groups.values())


def _wrong(table: pa.Table, fit: Fit) -> Iterator[tuple[int, str]]:
    """Yield the first row of each kind of error, and what is wrong with it."""
    import numpy as np
    import pyarrow.compute as pc

    lengths = {name: pc.list_value_length(table[name]).to_numpy() for name in (*TENSORS, "prompt_ids")}
    tokens = lengths["token_ids"]
    for name in TENSORS:
        if len(rows := np.flatnonzero(lengths[name] != tokens)):
            row = int(rows[0])
            yield row, f"{name} has {lengths[name][row]} values, token_ids {tokens[row]}."
            return  # values cannot be assigned to rows
    if len(rows := np.flatnonzero(lengths["prompt_ids"] > tokens)):
        row = int(rows[0])
        yield row, f"its prompt has {lengths['prompt_ids'][row]} tokens, the whole sequence {tokens[row]}."
    owner = np.repeat(np.arange(len(table)), tokens)
    values = {name: pc.list_flatten(table[name]).to_numpy() for name in TENSORS}
    ids, log_probs = values["token_ids"], values["rollout_log_probs"]
    if len(beyond := np.flatnonzero((ids < 0) | (ids >= fit.vocabulary))):
        at = beyond[0]
        yield (
            int(owner[at]),
            f"token id {ids[at]} is outside the model's vocabulary, 0 to {fit.vocabulary - 1}.",
        )
    sampled = values["loss_mask"].astype(bool)
    if len(odd := np.flatnonzero(sampled & ~(np.isfinite(log_probs) & (log_probs <= 1e-4)))):
        at = odd[0]
        yield (
            int(owner[at]),
            f"a sampled token has the log-prob {log_probs[at]}; expected a finite one of at most 0.",
        )
    rewards = table["reward"].to_numpy()  # null: NaN
    if len(odd := np.flatnonzero(table["valid"].to_numpy() & ~np.isfinite(rewards))):
        yield int(odd[0]), f"its reward is {rewards[odd[0]]}; expected a finite number, or valid = false."
    if fit.greedy and table["greedy_reward"].null_count == len(table):  # single ones may have failed
        yield 0, NOT_GREEDY
