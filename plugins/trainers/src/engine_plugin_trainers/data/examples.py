"""Rows to learn from: whole sequences with a mask of the tokens to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.data.chat import Rendered
from engine_core.data.render import Renderer
from engine_core.data.rows import BadRow
from engine_core.data.source import Preparer
from engine_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig
    from engine_core.data.layouts import Row
    from engine_core.data.rows import Rows


@dataclass(slots=True)
class Example:
    """A sequence to learn: ``Example("train:3", [5, 9, 7, 1], [False, False, True, True])``."""

    id: str
    token_ids: list[int]
    loss_mask: list[bool]  # True on the tokens to learn


class LearnedRenderer(Renderer):
    """A renderer of whole sequences with a loss mask; the first token, which nothing predicts, is never learned."""

    train_on_prompt = False  #: learn every token but the first

    def render(self, row: Row) -> Rendered:
        """Render a row that has its system message; the responses are learned, or the assistant's turns without one.

        Raises:
            BadRow: no token of the row would be learned.
        """
        prompt, response = row.prompt, row.response
        if isinstance(prompt, str):
            rendered = self._continuation(prompt, response)
        elif response is None:
            rendered = self.chat.conversation(prompt, tools=row.columns.get("tools"))
        else:
            turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
            rendered = self.chat.conversation([*prompt, *turns], len(prompt), row.columns.get("tools"))
        if self.train_on_prompt:
            rendered.loss_mask = [True] * len(rendered.token_ids)
        if rendered.loss_mask:
            rendered.loss_mask[0] = False
        if not any(rendered.loss_mask):
            why = "no token is the assistant's" if len(rendered.loss_mask) > 1 else "fewer than 2 tokens"
            raise BadRow(f"nothing to learn: {why}")
        return rendered

    def _continuation(self, prompt: str, response: Any) -> Rendered:
        """Render plain text: prompt, response, end of sequence."""
        if not isinstance(response, str):
            raise BadRow("the prompt is text, so the response must be text")
        if not response:
            raise BadRow("the response is empty")
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError("The tokenizer has no end-of-sequence token, so a response could never end.")
        before, learned = self._text_ids(prompt), [*self._ids(response), end]
        mask = [False] * len(before) + [True] * len(learned)
        return Rendered(prompt + response, before + learned, mask)


class ExamplePreparer(Preparer):
    """A preparer of `Example`s, and the base of those of other items to learn.

    Args:
        rows, tokenizer, config, split, limit: as `Preparer`.
        table: name of the trainer's option table, for messages.
        held: as `Preparer`.
        train_on_prompt: learn every token but the first.
    """

    makes: type = Example
    renders = LearnedRenderer
    learn = True
    held_by = "the model's number of positions (max_position_embeddings)"
    _renderer: LearnedRenderer

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        split: str,
        limit: int,
        table: str = "sft",
        held: int | None = None,
        train_on_prompt: bool = False,
    ) -> None:
        super().__init__(rows, tokenizer, config, split, limit, held)
        self.table, self.key = table, f"[{table}] max_tokens"
        self._renderer.train_on_prompt = train_on_prompt

    def _item(self, raw: dict[str, Any], index: int, name: str) -> Any:
        rendered = self._renderer.fit(self._row(raw, index), self.limit)
        return Example(name, rendered.token_ids, rendered.loss_mask)

    def _plain(self) -> list[Any]:
        return [self.split, self._asked, self.table, self._held, self._renderer.train_on_prompt]
