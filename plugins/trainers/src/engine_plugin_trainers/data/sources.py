"""Rows of examples, pairs and judged responses, in the order of ``engine_core.data.source.Source``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from engine_core.data.render import Example
from engine_core.data.source import Preparer, Source, open_rows
from engine_plugin_trainers.data.preferences import Judged, JudgedPreparer, Pair, PairPreparer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig
    from engine_plugin_trainers.options import SFTOptions

Item = TypeVar("Item")


class SFTSource(Source[Example]):
    """Sequences to learn, of the files of ``[data]``.

    Args:
        config, tokenizer, seed, split, rows: as ``PromptSource``.
        options: ``[sft]``.
        held: tokens of the longest sequence that the model has positions for; a longer one is over-long, too.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        options: SFTOptions,
        seed: int,
        split: str = "train",
        rows: Sequence[Any] | None = None,
        held: int | None = None,
    ) -> None:
        limits = options.max_tokens, True, options.train_on_prompt, held
        super().__init__(Preparer(open_rows(config, split, rows), tokenizer, config, split, *limits), seed)


class _PreferenceSource(Source[Item]):
    """What people or models preferred, of the files of ``[data]``.

    Args:
        config: ``[data]``.
        tokenizer: the run's tokenizer.
        max_tokens: longest sequence.
        table: of the trainer whose key that is, for messages.
        seed, split, rows: as ``PromptSource``.
        held: as `SFTSource`.
    """

    preparer: ClassVar[type[PairPreparer]]  # makes the items

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        table: str,
        seed: int,
        split: str = "train",
        rows: Sequence[Any] | None = None,
        held: int | None = None,
    ) -> None:
        opened = open_rows(config, split, rows)
        super().__init__(self.preparer(opened, tokenizer, config, split, max_tokens, table, held), seed)


class PairSource(_PreferenceSource[Pair]):
    """Pairs of responses."""

    preparer = PairPreparer


class JudgedSource(_PreferenceSource[Judged]):
    """Responses with a label."""

    preparer = JudgedPreparer
