"""Sources of examples, pairs and judged responses, in the order of ``engine_core.data.source.Source``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_core.data.render import Example
from engine_core.data.source import Preparer, Source, open_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig
    from engine_plugin_trainers.data.preferences import PairPreparer
    from engine_plugin_trainers.options import SFTOptions


class SFTSource(Source[Example]):
    """A source of sequences to learn, from the files of ``[data]``.

    Args:
        config, tokenizer, seed, split, rows: as ``PromptSource``.
        options: ``[sft]``.
        held: length of the model's position table, in tokens; a longer sequence is over-long too.
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


class PreferenceSource(Source[Any]):
    """A source of pairs or of judged responses, from the files of ``[data]``.

    Args:
        preparer: ``PairPreparer`` or ``JudgedPreparer``.
        config: ``[data]``.
        tokenizer: the run's tokenizer.
        max_tokens: longest sequence.
        table: name of the trainer's option table, for messages.
        seed, split, rows: as ``PromptSource``.
        held: as `SFTSource`.
    """

    def __init__(
        self,
        preparer: type[PairPreparer],
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
        super().__init__(preparer(opened, tokenizer, config, split, max_tokens, table, held), seed)
