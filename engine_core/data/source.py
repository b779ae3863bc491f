"""PromptSource, SFTSource, PairSource, JudgedSource: prepared rows in a seeded order, with a position that survives a stop.

The order is an endless row of epochs, each the permutation that (seed, epoch) give. The position counts
rows of that order, usable or not, up to the last one handed out: it does not depend on what was prepared
ahead, on the number of workers, or on which rows are skipped.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from engine_core.data.prepare import Outcome, Preparer
from engine_core.data.rows import MemoryRows, Rows
from engine_core.errors import DataError
from engine_core.plugins import PluginSet
from engine_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig
    from engine_core.contracts.parts import RowWorkers

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Place = tuple[int, int, int]  # epoch, position, row
COLUMN_ROWS = 16  # of each file, to know its columns: the rows of a JSONL file may differ
NAMED = 20  # skipped rows named in the log; the rest is counted


class Source(Generic[Item]):
    """Items of one split in order; its subclasses say of which kind."""

    def __init__(self, preparer: Preparer, seed: int) -> None:
        self._preparer, self._rows, self._config = preparer, preparer.rows, preparer.config
        self._seed, self._shuffle = seed, self._config.shuffle
        self._epoch = self._position = 0
        self._bad: set[int] = set()
        self._skipped: set[int] = set()  # rows that this process skipped, to name each once
        self._counts = {"bad_rows": 0, "over_long": 0, "truncated": 0}
        self._usable: int | None = None
        self._pool: RowWorkers | None = None
        self._stream = self._prepared(self._places())
        self._fingerprint = self._rows.fingerprint()
        # What no row can mend (a missing template, a wrong column) shows at once, before any work.
        first = preparer.prepare(0)
        if first.kind == "bad_rows" and self._config.max_bad_rows == 0:
            raise self._too_many(first.problem)

    def __len__(self) -> int:
        """Usable rows of an epoch. The first call prepares every row once, in the workers if there are any."""
        if self._usable is None:
            self._usable = sum(1 for _ in self._whole())
        return self._usable

    def take(self, n: int) -> list[Item]:
        """The next ``n`` items; a new epoch begins where one ends.

        Raises:
            DataError: more than ``max_bad_rows`` rows are unusable, a row is over-long and that is an
                error, or a whole epoch has no usable row. The position is after the row at fault.
        """
        items: list[Item] = []
        unusable = 0
        while len(items) < n:
            (epoch, position, index), outcome = next(self._stream)
            self._epoch, self._position = epoch, position + 1
            item = self._judge(index, outcome)
            unusable = 0 if item else unusable + 1
            if item:
                items.append(item)
            elif unusable >= 2 * len(self._rows) - 1:  # end of one epoch and beginning of the next
                raise DataError(
                    f"[data] None of the {len(self._rows)} rows is usable. Last: {outcome.problem}."
                )
        return items

    def all(self, limit: int | None = None) -> list[Item]:
        """All usable items, or the first ``limit``, in the order of the files. The position stays."""
        return list(itertools.islice(self._whole(), limit))

    @property
    def counters(self) -> dict[str, float]:
        """Flat metrics: epochs passed, rows skipped and cut so far (each time one comes up counts)."""
        return {
            "data/epoch": self._epoch + self._position / len(self._rows),
            **{f"data/{name}": float(count) for name, count in self._counts.items()},
            "data/worker_restarts": float(self._pool.restarts if self._pool else 0),
        }

    def columns(self) -> set[str]:
        """Names of the columns that rewards receive, as far as the first usable rows of each file show them."""
        names: set[str] = set()
        first = 0
        for file in self._rows.files:
            outcomes = map(self._preparer.prepare, range(first, first + min(len(file), COLUMN_ROWS)))
            items = (outcome.item for outcome in outcomes if outcome.item is not None)
            names |= {column for item in items for column in getattr(item, "columns", ())}
            first += len(file)
        return names

    def spread(self, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Place and columns of at most so many rows, spread evenly from the first on; unusable ones are left out."""
        for index in range(0, len(self._rows), math.ceil(len(self._rows) / most)):
            columns = self._preparer.columns(index)
            if columns is not None:
                yield self._rows.where(index), columns

    def state(self) -> dict[str, Any]:
        """The position after the last item handed out, as JSON."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "files": self._fingerprint,
            "bad": sorted(self._bad),
            "counts": dict(self._counts),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, with its seed and order.

        Raises:
            DataError: the files have other numbers of rows, or ``state`` is none of ours; nothing changed.
        """
        try:
            was = [int(file["rows"]) for file in state["files"]]
            order = int(state["seed"]), bool(state["shuffle"])
            place = int(state["epoch"]), int(state["position"])
            bad = {int(row) for row in state["bad"]}
            counts = {name: int(state["counts"][name]) for name in self._counts}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"The checkpoint's data position cannot be read: {error!r}.") from error
        if (now := [len(file) for file in self._rows.files]) != was:
            raise DataError(
                f"The data changed since the checkpoint: its files had {was} rows, now {now}, so its position "
                "means other rows. Bring the files back, or start a new run from the checkpoint's model."
            )
        if state["files"] != self._fingerprint:
            logger.warning(
                "The data files changed since the checkpoint, in content but not in number of rows."
            )
        if order != (self._seed, self._shuffle):
            logger.warning(
                "Data order: seed %s, shuffle %s of the checkpoint hold, not the run file's.", *order
            )
        (self._seed, self._shuffle), (self._epoch, self._position) = order, place
        self._bad, self._counts = bad, counts
        self._stream = self._prepared(self._places())

    def close(self) -> None:
        """End the workers. The source can be used again, which starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            self._stream = self._prepared(self._places())

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._rows))
        import numpy

        order: list[int] = numpy.random.default_rng([self._seed, epoch]).permutation(len(self._rows)).tolist()
        return order

    def _places(self) -> Iterator[Place]:
        """The places from the present position on, without end."""
        start = self._position
        for epoch in itertools.count(self._epoch):
            for position, row in itertools.islice(enumerate(self._order(epoch)), start, None):
                yield epoch, position, row
            start = 0

    def _whole(self) -> Iterator[Item]:
        """Every usable item once, in the order of the files; interrupts what was prepared ahead."""
        self._stream = self._prepared(self._places())
        for (_, _, index), outcome in self._prepared((0, row, row) for row in range(len(self._rows))):
            if item := self._judge(index, outcome, count=False):
                yield item

    def _prepared(self, places: Iterator[Place]) -> Iterator[tuple[Place, Outcome]]:
        """``places`` with the outcome of each, prepared ahead where there are workers."""
        config = self._config
        if config.num_workers == 0 or not self._rows.paths:
            for place in places:
                yield place, self._preparer.prepare(place[2])
            return
        if self._pool is None:
            setup, tokenizer = self._preparer.setup(), self._preparer.tokenizer
            self._pool = PluginSet().require("parts", "row_workers")(
                setup, tokenizer, config.num_workers, config.prefetch_factor, self._rows.where
            )
        size = math.ceil(config.prompts_per_step / config.num_workers)  # one step is spread over all
        make = self._preparer.makes
        sent: deque[list[Place]] = deque()

        def chunks() -> Iterator[list[int]]:
            while chunk := list(itertools.islice(places, size)):
                sent.append(chunk)
                yield [row for _, _, row in chunk]

        assert self._pool is not None
        for answers in self._pool.results(chunks()):
            for place, answer in zip(sent.popleft(), answers, strict=True):
                yield place, Outcome(**{**answer, "item": answer["item"] and make(**answer["item"])})

    def _judge(self, index: int, outcome: Outcome, count: bool = True) -> Item | None:
        """The item, or None for a row to skip, which is counted and named."""
        if outcome.kind != "ok":
            self._counts[outcome.kind] += count
        if outcome.item is not None:
            return outcome.item
        if outcome.kind == "bad_rows":
            self._bad.add(index)
            if len(self._bad) > self._config.max_bad_rows:
                raise self._too_many(outcome.problem)
        elif self._config.over_long == "error":
            raise DataError(
                f"{outcome.problem}. {self._preparer.remedy}, or set over_long to skip or truncate_left in [data]."
            )
        if index not in self._skipped and len(self._skipped) < NAMED:
            logger.warning("Skipped a row: %s.", outcome.problem)
            if len(self._skipped) == NAMED - 1:
                logger.warning("Further skipped rows are counted (data/bad_rows, data/over_long), not named.")
        self._skipped.add(index)
        return None

    def _too_many(self, problem: str) -> DataError:
        return DataError(
            f"{problem}. Unusable rows so far: {max(len(self._bad), 1)}; [data] max_bad_rows is "
            f"{self._config.max_bad_rows}. Mend the row, or raise max_bad_rows to skip such rows."
        )


class PromptSource(Source[Prompt]):
    """Prompts to sample from, of the files of ``[data]``.

    Args:
        config: ``[data]``.
        tokenizer: the run's tokenizer.
        seed: of the order.
        split: ``train`` or ``validation``.
        rows: rows as dicts in place of files (``train.source_rows.rows_of``); they are prepared without workers.
        held: tokens of prompt and response together that there is room for; a prompt without room for a response is
            over-long, too.

    Raises:
        DataError: no files, an unreadable file, or a first row that shows that none can be used.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        split: str = "train",
        rows: Sequence[Any] | MemoryRows | None = None,
        held: int | None = None,
    ) -> None:
        opened = open_rows(config, split, rows)
        limit, room = config.max_prompt_tokens, None if held is None else held - 1
        super().__init__(Preparer(opened, tokenizer, config, split, limit, held=room), seed)


def open_rows(config: DataConfig, split: str, rows: Sequence[Any] | MemoryRows | None) -> Rows:
    """Return the rows of a split.

    Args:
        config: ``[data]``.
        split: ``train`` or ``validation``.
        rows: given from Python, or those of a data source; None: the files of ``[data]`` hold them.

    Raises:
        DataError: there are none, or a file cannot be read.
    """
    if isinstance(rows, MemoryRows):
        return Rows(rows)
    if rows is not None:
        if len(rows) == 0:
            raise DataError(f"The {split} data given from Python has 0 rows.")
        return Rows(MemoryRows(rows))
    files = config.train if split == "train" else config.validation
    if not files:
        raise DataError(f"[data] {split} names no file.")
    return Rows([files] if isinstance(files, str) else files)
