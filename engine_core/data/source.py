"""Data sources: prepared rows in a seeded order, with a position that checkpoints save.

The order is an endless sequence of epochs (``order``). The position counts rows of that order, usable or not, up to the
last row returned. It does not depend on prefetching, on the number of workers, or on which rows are skipped.

A `Preparer` turns a row number into an `Outcome`, in a worker or in the controller.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from engine_core.data import layouts
from engine_core.data.render import OverLong, Renderer
from engine_core.data.rows import BadRow, MemoryRows, Rows, open_rows
from engine_core.data.tokenizer import tokenizer_hash
from engine_core.errors import DataError, did_you_mean
from engine_core.plugins import PluginSet
from engine_core.types import Prompt

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig
    from engine_core.contracts.parts import CurriculumRounds, RowWorkers


@dataclass(slots=True)
class Outcome:
    """The result of preparing one row: an item, or the reason why there is none."""

    kind: Literal["ok", "bad_rows", "over_long"]  # all but the first are also counters
    item: Any = None  # for the first kind: `Preparer.makes`
    problem: str = ""  # for the last two kinds, with the row's location


class Preparer:
    """The function from row numbers to `Outcome`; used by workers, and by the controller without workers.

    A trainer that learns from rows derives from this class: it replaces the class attributes, ``_item`` and ``_plain``.

    Args:
        rows: the rows.
        tokenizer: the run's tokenizer.
        config: ``[data]``.
        split: first part of every id.
        limit: maximum length of a sequence in tokens.
        held: maximum length that the engines support, which may be below ``limit``; None: no such limit.
        tools: tools for rows that have none.
    """

    makes: type = Prompt  #: the class of the items
    renders: type[Renderer] = Renderer
    learn = False  #: read rows for supervised learning, as ``layouts.convert``
    key = "[data] max_prompt_tokens"  #: what sets ``limit``, for messages
    held_by = "the longest prompt that leaves model and sampler room for a response"  #: what ``held`` is, for messages

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        split: str,
        limit: int,
        held: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.rows, self.tokenizer, self.config, self.split = rows, tokenizer, config, split
        self._asked, self._held, self._tools = limit, held, list(tools)
        self.limit = limit if held is None else min(limit, held)
        # the first remedy for a row that is too long, for messages
        self.remedy = "Shorten the row" if self.limit < limit else "Raise it"
        self._renderer = self.renders(tokenizer, config)
        self._layouts: dict[int, str] = {}  # by file

    def prepare(self, index: int) -> Outcome:
        """Read, convert, render and tokenize row ``index``.

        Raises:
            DataError: the tokenizer or the configuration cannot be used with any row.
        """
        try:
            raw = self.rows.row(index)
            item = self._item(raw, index, f"{self.split}:{self._id(raw, index)}")
        except BadRow as problem:
            return Outcome("bad_rows", problem=f"{self.rows.where(index)}: {str(problem).removesuffix('.')}")
        except OverLong as problem:
            limit = f"{self.key if self.limit == self._asked else self.held_by} is {self.limit}"
            return Outcome("over_long", problem=f"{self.rows.where(index)}: {problem}; {limit}")
        return Outcome("ok", item)

    def columns(self, index: int) -> dict[str, Any] | None:
        """Return the columns of row ``index`` that rewards receive, without rendering; None for an unusable row."""
        try:
            return self._row(self.rows.row(index), index).columns
        except BadRow:  # reported when the row is prepared
            return None

    def _item(self, raw: dict[str, Any], index: int, name: str) -> Any:
        """Return the item of a row."""
        row = self._row(raw, index)
        if self._tools and "tools" not in row.columns:
            row.columns["tools"] = self._tools
            if isinstance(row.prompt, str) and not self.config.chat_template:
                raise DataError(
                    "The environment declares tools, but rows of plain text are rendered without the chat template, "
                    'which shows tools. Set chat_template = true in [data], or columns.tools = "".'
                )
        rendered = self._renderer.fit(row, self.limit)
        messages = {} if rendered.messages is None else {"messages": rendered.messages}
        return Prompt(name, rendered.token_ids, rendered.text, row.columns | messages)

    def _row(self, raw: dict[str, Any], index: int) -> layouts.Row:
        return layouts.convert(raw, self._layout(index), self.config.columns, self.learn)

    def _layout(self, index: int) -> str:
        """Return the layout of the row's file: that of its first readable row."""
        if self.config.format != "auto":
            return self.config.format
        file, local = self.rows.locate(index)
        first = index - local
        for candidate in range(first, first + min(len(self.rows.files[file]), self.config.max_bad_rows + 1)):
            if file not in self._layouts:
                with contextlib.suppress(BadRow):  # counted when the row is prepared
                    self._layouts[file] = layouts.detect(self.rows.row(candidate), self.config.columns)
        return self._layouts.get(file) or layouts.detect(self.rows.row(index), self.config.columns)

    def _id(self, raw: dict[str, Any], index: int) -> Any:
        name = self.config.columns.id
        if name is None:
            return index
        if raw.get(name) is None:
            raise BadRow(f"no value in column '{name}' ([data.columns] id).{did_you_mean(name, raw)}")
        return raw[name]

    def setup(self) -> dict[str, Any]:
        """Return the plain values from which the part ``row_workers`` builds an equal preparer in another process."""
        return {
            "files": [str(path.resolve()) for path in self.rows.paths],
            "cache": self.rows.cache,
            "config": self.config.model_dump(exclude_unset=True),
            "model": str(self.tokenizer.name_or_path),  # its generation config has further end tokens
            "tokenizer_class": type(self.tokenizer).__name__,
            "tokenizer_hash": tokenizer_hash(self.tokenizer),
            "preparer": f"{type(self).__module__}:{type(self).__name__}",
            "plain": self._plain(),
        }

    def _plain(self) -> list[Any]:
        """Return the constructor's arguments after ``config``."""
        return [self.split, self._asked, self._held, self._tools]


logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Place = tuple[int, int, int]  # epoch, position, row
COLUMN_ROWS = 16  # rows of each file that `columns` reads: the rows of a JSONL file may differ
NAMED = 20  # maximum number of skipped rows that are logged; the others are counted


class Source(Generic[Item]):
    """The items of one split in order; subclasses set the kind of item."""

    def __init__(self, preparer: Preparer, seed: int) -> None:
        from engine_core.data.order import shares  # imports numpy

        self._preparer, self._rows, self._config = preparer, preparer.rows, preparer.config
        self._seed, self._shuffle = seed, self._config.shuffle
        self._epoch = self._position = 0
        self._bad: set[int] = set()
        self._skipped: set[int] = set()  # rows that this process logged as skipped, each once
        parts, mix = self._rows.parts, self._config.mix
        self._mix = [[len(rows), count] for (_, rows), count in zip(parts, shares(parts), strict=True)]
        names = [f"mix/{part.name or number}" for number, part in enumerate(mix) if len(parts) > 1]
        self._parts = [(name, rows) for name, (_, rows) in zip(names, parts, strict=False)]
        self._counts = dict.fromkeys(["bad_rows", "over_long", *names], 0)
        self._usable: int | None = None
        self._pool: RowWorkers | None = None
        #: its rounds replace epochs; set before the first row is taken
        self.curriculum: CurriculumRounds | None = None
        self._stream = self._prepared(self._places())
        self._fingerprint = self._rows.fingerprint()
        # Fail at once on problems that all rows have (a missing template, a wrong column).
        first = preparer.prepare(0)
        if first.kind == "bad_rows" and self._config.max_bad_rows == 0:
            raise self._too_many(first.problem)

    def __len__(self) -> int:
        """Return the number of usable rows of the first epoch. The first call prepares each, in workers if configured."""
        if self._usable is None:
            self._usable = sum(1 for _ in self._whole(self._order(0) if self._parts else None))
        if not self._usable:
            raise self._none_usable()
        return self._usable

    def take(self, n: int) -> list[Item]:
        """Return the next ``n`` items; after the end of an epoch the next epoch begins.

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
                for name, rows in self._parts:
                    self._counts[name] += index in rows
            elif unusable >= 2 * self._length() - 1:  # end of one epoch and beginning of the next
                raise self._none_usable(outcome.problem)
        return items

    def all(self, limit: int | None = None) -> list[Item]:
        """Return all usable items, or the first ``limit``, in the order of the files. The position does not change."""
        return list(itertools.islice(self._whole(), limit))

    @property
    def counters(self) -> dict[str, float]:
        """Metrics: epochs or rounds passed, rows skipped and rows of each part so far; a row counts in every epoch."""
        return {
            "data/epoch": self._epoch + self._position / self._length(),
            **{f"data/{name}": float(count) for name, count in self._counts.items()},
            "data/worker_restarts": float(self._pool.restarts if self._pool else 0),
        }

    def columns(self) -> set[str]:
        """Return the names of the columns that rewards receive, from the first usable rows of each file.

        Raises:
            DataError: no row is usable.
        """
        items: list[Any] = []
        first = 0
        for file in self._rows.files:
            outcomes = map(self._preparer.prepare, range(first, first + min(len(file), COLUMN_ROWS)))
            items += [outcome.item for outcome in outcomes if outcome.item is not None]
            first += len(file)
        if not items and not (items := self.all(1)):
            raise self._none_usable()
        return {column for item in items for column in getattr(item, "columns", ())}

    def outcomes(self, first: int = 0) -> Iterator[tuple[str, Outcome]]:
        """Yield location and outcome of each row from number ``first`` on, in the order of the files."""
        for index in range(first, len(self._rows)):
            yield self._rows.where(index), self._preparer.prepare(index)

    def spread(self, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield location and columns of at most ``most`` rows, evenly spaced; unusable rows are omitted."""
        for index in range(0, len(self._rows), math.ceil(len(self._rows) / most)):
            columns = self._preparer.columns(index)
            if columns is not None:
                yield self._rows.where(index), columns

    def state(self) -> dict[str, Any]:
        """Return the position after the last item that ``take`` returned, as values that JSON can hold."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "files": self._fingerprint,
            "bad": sorted(self._bad),
            "counts": dict(self._counts),
            "mix": self._mix,
            "curriculum": self.curriculum and self.curriculum.state(self._epoch),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the position of ``state``, with its seed and order.

        Raises:
            DataError: the files have other numbers of rows, the parts of a mix other shares, or ``state`` is
                malformed; nothing changed.
        """
        try:
            was = [int(file["rows"]) for file in state["files"]]
            order = int(state["seed"]), bool(state["shuffle"])
            place = int(state["epoch"]), int(state["position"])
            bad, mix = {int(row) for row in state["bad"]}, state.get("mix", self._mix)
            counts = {name: int(state["counts"].get(name, 0)) for name in self._counts}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"The checkpoint's data position cannot be read: {error!r}.") from error
        if (now := [len(file) for file in self._rows.files]) != was:
            raise DataError(
                f"The data changed since the checkpoint: its files had {was} rows, now {now}, so its position "
                "means other rows. Restore the files, or start a new run from the checkpoint's model."
            )
        if mix != self._mix:
            raise DataError(
                "[data] mix changed since the checkpoint, so its position means other rows. [rows, rows in an epoch] of each "
                f"part were {mix}, now {self._mix}. Restore the parts, or start a new run from the checkpoint's model."
            )
        if state["files"] != self._fingerprint:
            logger.warning(
                "The data files changed since the checkpoint, in content but not in number of rows."
            )
        if order != (self._seed, self._shuffle):
            logger.warning(
                "Data order: seed %s, shuffle %s of the checkpoint apply, not the run file's.", *order
            )
        (self._seed, self._shuffle), (self._epoch, self._position) = order, place
        self._bad, self._counts = bad, counts
        if self.curriculum is not None and state.get("curriculum"):
            self.curriculum.load_state(state["curriculum"], self._epoch)
        self._stream = self._prepared(self._places())

    def close(self) -> None:
        """Stop the workers. Using the source again starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            self._stream = self._prepared(self._places())

    def _places(self) -> Iterator[Place]:
        """Yield all places from the current position on, without end."""
        start = self._position
        for epoch in itertools.count(self._epoch):
            order = self._order(epoch)
            for position in range(start, len(order)):
                yield epoch, position, int(order[position])
            start = 0

    def _order(self, epoch: int) -> NDArray[Any]:
        """Return the row numbers of an epoch or a round in their order."""
        from engine_core.data.order import order_of

        if self.curriculum:
            return self.curriculum.order(self._rows, epoch)
        return order_of(self._rows.parts, self._seed if self._shuffle else None, epoch)

    def _whole(self, order: Iterable[int] | None = None) -> Iterator[Item]:
        """Yield every usable item of ``order``, by default of the files; discards prefetched rows."""
        self._stream = self._prepared(self._places())
        order = range(len(self._rows)) if order is None else map(int, order)
        for (_, _, index), outcome in self._prepared((0, row, row) for row in order):
            if item := self._judge(index, outcome, count=False):
                yield item

    def _prepared(self, places: Iterator[Place]) -> Iterator[tuple[Place, Outcome]]:
        """Yield ``places`` with the outcome of each; workers, if configured, prepare rows ahead."""
        config = self._config
        in_files = len(self._rows.paths) == len(self._rows.files)
        if config.num_workers == 0 or not in_files:
            for place in places:
                yield place, self._preparer.prepare(place[2])
            return
        if self._pool is None:
            setup, tokenizer = self._preparer.setup(), self._preparer.tokenizer
            self._pool = PluginSet().require("parts", "row_workers")(
                setup, tokenizer, config.num_workers, config.prefetch_factor, self._rows.where
            )
        size = math.ceil(config.prompts_per_step / config.num_workers)  # one step is spread over all workers
        make = self._preparer.makes
        sent: deque[list[Place]] = deque()

        def chunks() -> Iterator[list[int]]:
            """Yield the row numbers of the next chunks of places."""
            while chunk := list(itertools.islice(places, size)):
                sent.append(chunk)
                yield [row for _, _, row in chunk]

        assert self._pool is not None
        for answers in self._pool.results(chunks()):
            for place, answer in zip(sent.popleft(), answers, strict=True):
                yield place, Outcome(**{**answer, "item": answer["item"] and make(**answer["item"])})

    def _judge(self, index: int, outcome: Outcome, count: bool = True) -> Item | None:
        """Return the item; None for a skipped row, which is counted and logged.

        Raises:
            DataError: too many rows are unusable, or the row is over-long and `over_long` is ``error``.
        """
        if outcome.item is not None:
            return outcome.item
        self._counts[outcome.kind] += count
        if outcome.kind == "bad_rows":
            self._bad.add(index)
            if len(self._bad) > self._config.max_bad_rows:
                raise self._too_many(outcome.problem)
        elif self._config.over_long == "error":
            raise DataError(
                f"{outcome.problem}. {self._preparer.remedy}, or set over_long to skip in [data]."
            )
        if index not in self._skipped and len(self._skipped) < NAMED:
            self._skipped.add(index)
            logger.warning("Skipped a row: %s.", outcome.problem)
            if len(self._skipped) == NAMED:
                logger.warning("Further skipped rows are counted (data/bad_rows, data/over_long), not named.")
        return None

    def _length(self) -> int:
        """Return the number of rows, usable or not, of this epoch or round."""
        return len(self.curriculum.order(self._rows, self._epoch) if self.curriculum else self._rows)

    def _none_usable(self, problem: str = "") -> DataError:
        problem = problem or self._preparer.prepare(len(self._rows) - 1).problem
        rows = f"{self._length()} rows" + (f" of round {self._epoch}" if self.curriculum else "")
        return DataError(f"[data] None of the {rows} is usable. Last: {problem}.")

    def _too_many(self, problem: str) -> DataError:
        return DataError(
            f"{problem}. Unusable rows so far: {max(len(self._bad), 1)}; [data] max_bad_rows is "
            f"{self._config.max_bad_rows}. Fix the row, or raise max_bad_rows to skip such rows."
        )


class PromptSource(Source[Prompt]):
    """The prompts to sample from, of the files of ``[data]``.

    Args:
        config: ``[data]``.
        tokenizer: the run's tokenizer.
        seed: seed of the order.
        split: ``train`` or ``validation``.
        rows: rows as dicts in place of files (``train.given.GivenRows``); they are prepared without workers.
        held: maximum tokens of prompt and response together that model and sampler support; a prompt that leaves no
            room for a response is over-long, too.
        tools: tools for rows that have none.

    Raises:
        DataError: no file is named, a file cannot be read, or the first row shows that no row can be used.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        split: str = "train",
        rows: Sequence[Any] | MemoryRows | Mapping[str, MemoryRows] | None = None,
        held: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        opened = open_rows(config, split, rows)
        limit, room = config.max_prompt_tokens, None if held is None else held - 1
        super().__init__(Preparer(opened, tokenizer, config, split, limit, room, tools), seed)
