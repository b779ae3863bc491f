"""Row number -> `Outcome`: the whole way of one row, in a worker or in the controller."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine_core.config.models import DataConfig
from engine_core.data import layouts
from engine_core.data.render import Example, OverLong, Renderer
from engine_core.data.rows import BadRow, Rows
from engine_core.data.tokenizer import tokenizer_hash
from engine_core.errors import DataError, did_you_mean
from engine_core.specs import resolve
from engine_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Outcome:
    """What came of one row: an item, or why there is none."""

    kind: Literal["ok", "truncated", "bad_rows", "over_long"]  # all but the first are also counters
    item: Any = None  # of the first two: a Prompt, an Example, a Pair or a Judged
    problem: str = ""  # of the last two, with the row's place


class Preparer:
    """Row number -> `Outcome`; what a worker does, and the controller without workers.

    Args:
        rows: where rows come from.
        tokenizer: the run's tokenizer.
        config: ``[data]``.
        split: first part of every id.
        limit: longest sequence in tokens.
        learn: True makes Examples, False Prompts.
        train_on_prompt: Examples learn every token.
        held: tokens that there is room for, where they may be fewer than ``limit``.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        split: str,
        limit: int,
        learn: bool = False,
        train_on_prompt: bool = False,
        held: int | None = None,
    ) -> None:
        self.rows, self.tokenizer, self.config, self.split = rows, tokenizer, config, split
        self.learn, self.train_on_prompt = learn, train_on_prompt
        self._asked, self._held = limit, held
        self.limit = limit if held is None else min(limit, held)
        self._renderer = Renderer(tokenizer, config, learn, train_on_prompt)
        self._layouts: dict[int, str] = {}  # by file

    @property
    def makes(self) -> type:
        """The class of its items."""
        return Example if self.learn else Prompt

    @property
    def limit_key(self) -> str:
        """The key of ``limit``, for messages."""
        if self.limit < self._asked:
            if self.learn:
                return "the number of positions that the model has (max_position_embeddings)"
            return "the longest prompt that model and sampler have room for with a response"
        return self._key

    @property
    def remedy(self) -> str:
        """What to do about a row that is too long, before what `over_long` offers."""
        return "Shorten the row" if self.limit < self._asked else "Raise it"

    @property
    def _key(self) -> str:
        """That asks for ``limit``."""
        return "[sft] max_tokens" if self.learn else "[data] max_prompt_tokens"

    def prepare(self, index: int) -> Outcome:
        """Read, convert, render and tokenise row ``index``; raises DataError for what no row can mend."""
        try:
            raw = self.rows.row(index)
            item, was_cut = self._item(raw, index, f"{self.split}:{self._id(raw, index)}")
        except BadRow as problem:
            return Outcome("bad_rows", problem=f"{self.rows.where(index)}: {problem}")
        except OverLong as problem:
            limit = f"{self.limit_key} is {self.limit}"
            return Outcome("over_long", problem=f"{self.rows.where(index)}: {problem}; {limit}")
        return Outcome("truncated" if was_cut else "ok", item)

    def columns(self, index: int) -> dict[str, Any] | None:
        """What rewards receive of row ``index``, without rendering it; None for a row that cannot be used."""
        try:
            return layouts.convert(
                self.rows.row(index), self._layout(index), self.config.columns, self.learn
            ).columns
        except BadRow:  # told when its turn comes
            return None

    def _item(self, raw: dict[str, Any], index: int, name: str) -> tuple[Any, bool]:
        """What a row becomes, and whether it had to be cut."""
        row = layouts.convert(raw, self._layout(index), self.config.columns, self.learn)
        rendered, was_cut = self._renderer.fit(row, self.limit)
        if self.learn:
            return Example(name, rendered.token_ids, rendered.loss_mask), was_cut
        messages = {} if rendered.messages is None else {"messages": rendered.messages}
        return Prompt(name, rendered.token_ids, rendered.text, row.columns | messages), was_cut

    def _layout(self, index: int) -> str:
        """The layout of the row's file: that of its first readable row."""
        if self.config.format != "auto":
            return self.config.format
        file, local = self.rows.locate(index)
        first = index - local
        for candidate in range(first, first + min(len(self.rows.files[file]), self.config.max_bad_rows + 1)):
            if file not in self._layouts:
                with contextlib.suppress(BadRow):  # counted when its own turn comes
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
        """What `from_setup` makes an equal preparer of, as plain values."""
        return {
            "files": [str(path.resolve()) for path in self.rows.paths],
            "cache": self.rows.cache,
            "config": self.config.model_dump(exclude_unset=True),
            "tokenizer_class": type(self.tokenizer).__name__,
            "tokenizer_hash": tokenizer_hash(self.tokenizer),
            "preparer": f"{type(self).__module__}:{type(self).__name__}",
            "plain": self._plain(),
        }

    def _plain(self) -> list[Any]:
        """Arguments of the constructor after ``config``."""
        return [self.split, self._asked, self.learn, self.train_on_prompt, self._held]

    @staticmethod
    def from_setup(setup: dict[str, Any]) -> Preparer:
        """The preparer of a worker; ``setup["tokenizer"]`` is a folder."""
        import transformers

        # Its own class where the library has it: AutoTokenizer imports the configurations of all models.
        kind = getattr(transformers, setup["tokenizer_class"], None) or transformers.AutoTokenizer
        tokenizer = kind.from_pretrained(setup["tokenizer"], local_files_only=True)
        if tokenizer_hash(tokenizer) != setup["tokenizer_hash"]:
            raise DataError(
                "the tokenizer is another one once saved and loaded. Set num_workers = 0 in [data]."
            )
        rows = Rows(setup["files"], setup["cache"])
        preparer: type[Preparer] = resolve(setup["preparer"])
        return preparer(rows, tokenizer, DataConfig.model_validate(setup["config"]), *setup["plain"])
