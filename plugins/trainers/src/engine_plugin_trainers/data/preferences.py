"""Rows of preferences: a better and a worse response to one prompt, or one response judged good or bad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.data import layouts
from engine_core.data.source import Preparer
from engine_core.errors import DataError
from engine_plugin_trainers.data.pairs import convert_pair, label_of, margin_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig
    from engine_core.data.rows import Rows


@dataclass(slots=True)
class Pair:
    """Two sequences of one prompt: ``Pair("train:3", [5, 9, 7, 1], [0, 0, 1, 1], [5, 9, 8, 1], [0, 0, 1, 1])``."""

    id: str
    chosen_ids: list[int]
    chosen_mask: list[bool]  # True on the tokens of the response
    rejected_ids: list[int]
    rejected_mask: list[bool]
    margin: float = 0.0  # by how much the score of the chosen one is to be higher


@dataclass(slots=True)
class Judged:
    """One sequence and its label: ``Judged("train:3", [5, 9, 7, 1], [0, 0, 1, 1], True)``."""

    id: str
    token_ids: list[int]
    loss_mask: list[bool]  # True on the tokens of the response
    desirable: bool


class PairPreparer(Preparer):
    """Row number -> `Outcome` with a `Pair`.

    Args:
        rows: where rows come from.
        tokenizer: the run's tokenizer.
        config: ``[data]``.
        split: first part of every id.
        limit: longest sequence in tokens; a pair is cut or skipped as one.
        table: of the trainer, for messages.
        held: as `Preparer`.
    """

    makes: type = Pair

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        split: str,
        limit: int,
        table: str,
        held: int | None = None,
    ) -> None:
        if self.makes is Pair and config.format not in ("auto", "trl"):
            raise DataError(
                f"[data] format = '{config.format}': pairs are read from the columns prompt, chosen and rejected. "
                "Remove the key."
            )
        super().__init__(rows, tokenizer, config, split, limit, learn=True, held=held)
        self.table = table

    @property
    def _key(self) -> str:
        return f"[{self.table}] max_tokens"

    def _item(self, raw: dict[str, Any], index: int, name: str) -> tuple[Any, bool]:
        columns = self.config.columns
        sides, margin = convert_pair(raw, columns), margin_of(raw, columns)
        for side in sides:
            side.columns["tools"] = layouts.tools_of(raw, columns)
        (chosen, rejected), was_cut = self._renderer.fit_together(sides, self.limit)
        masked = chosen.token_ids, chosen.loss_mask, rejected.token_ids, rejected.loss_mask
        return Pair(name, *masked, margin), was_cut

    def _plain(self) -> list[Any]:
        return [self.split, self._asked, self.table, self._held]


class JudgedPreparer(PairPreparer):
    """Row number -> `Outcome` with a `Judged`: any layout of SFT, and a label."""

    makes = Judged

    def _item(self, raw: dict[str, Any], index: int, name: str) -> tuple[Any, bool]:
        row = layouts.convert(raw, self._layout(index), self.config.columns, learn=True)
        rendered, was_cut = self._renderer.fit(row, self.limit)
        label = label_of(raw, self.config.columns)
        return Judged(name, rendered.token_ids, rendered.loss_mask, label), was_cut
