"""Rendering of a `Row` to token ids: the chat template, over-long rows, and loss masks.

Text without a template is tokenized with the tokenizer's default special tokens. Text from a template is
tokenized without them, because the template writes special tokens.

``truncate_left`` never cuts through a template. It drops the oldest exchange of a conversation while more
than one is left, then the beginning of the oldest message, and renders again. A system message stays. A row
that is still too long is skipped and counted as over-long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_core.data.chat import ChatFormat, Rendered, tokenizing
from engine_core.data.layouts import Message, Row, with_system
from engine_core.data.rows import BadRow
from engine_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig


@dataclass(slots=True)
class Example:
    """A sequence to learn: ``Example("train:3", [5, 9, 7, 1], [False, False, True, True])``."""

    id: str
    token_ids: list[int]
    loss_mask: list[bool]  # True on the tokens to learn


class OverLong(Exception):
    """A row exceeds its limit and may not or cannot be cut. ``length`` is in tokens."""

    def __init__(self, length: int) -> None:
        self.length = length
        super().__init__(f"{length} tokens")


class Renderer:
    """A renderer of rows for one tokenizer and one ``[data]`` table.

    With ``learn`` it renders whole sequences with a loss mask, else prompts to sample from.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        learn: bool = False,
        train_on_prompt: bool = False,
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.chat = ChatFormat(tokenizer, config.control_tokens)
        self.learn, self.train_on_prompt = learn, train_on_prompt
        added, end = list(tokenizer("")["input_ids"]), tokenizer.eos_token_id
        self._adds_end = added[-1:] == [end] and (len(added) > 1 or tokenizer.bos_token_id != end)

    def fit(self, row: Row, limit: int) -> tuple[Rendered, bool]:
        """Render ``row`` in at most ``limit`` tokens; also return whether it was cut.

        Raises:
            BadRow: the row cannot be rendered.
            OverLong: the row is longer and ``over_long`` is not ``truncate_left``, or cutting did not suffice.
        """
        (rendered,), was_cut = self.fit_together([row], limit)
        return rendered, was_cut

    def fit_together(self, rows: Sequence[Row], limit: int) -> tuple[list[Rendered], bool]:
        """Render rows with the same prompt, each in at most ``limit`` tokens; a cut prompt is cut alike in all rows.

        Raises:
            BadRow, OverLong: as ``fit``.
        """
        rows = [self._prepare(row) for row in rows]
        rendered = [self._render(row) for row in rows]
        length = _longest(rendered)
        # Each round is shorter, but tokenizing again may remove fewer tokens than were cut.
        while (excess := _longest(rendered) - limit) > 0:
            if self.config.over_long != "truncate_left" or (cut := self._cut(rows[0], excess)) is None:
                raise OverLong(length)
            rows = [replace(row, prompt=cut.prompt) for row in rows]
            rendered = [self._render(row) for row in rows]
        return rendered, _longest(rendered) < length

    def _prepare(self, row: Row) -> Row:
        """Return ``row`` with the system message, as a conversation if the chat template is used."""
        plain, use = isinstance(row.prompt, str), self.config.chat_template
        if use or (use is None and not plain):
            turns = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
            return replace(row, prompt=with_system(turns, self.config.system))
        if not plain:
            raise DataError("[data] chat_template is false, but a row is a conversation. Remove the key.")
        if self.config.system is not None:
            raise DataError(
                "[data] system needs a chat template, and rows of plain text are rendered without one. "
                "Set chat_template = true in [data], or write the text into the rows."
            )
        return row

    def _render(self, row: Row) -> Rendered:
        if not self.learn:
            return self._prompt(row.prompt, row.columns.get("tools"))
        if isinstance(row.prompt, list):
            rendered = self._conversation(row.prompt, row.response, row.columns.get("tools"))
        else:
            rendered = self._continuation(row.prompt, row.response)
        if self.train_on_prompt:
            rendered.loss_mask = [True] * len(rendered.token_ids)
        elif not any(rendered.loss_mask):
            raise BadRow("nothing to learn: no token is the assistant's")
        return rendered

    def _prompt(self, prompt: str | list[Message], tools: Any) -> Rendered:
        if isinstance(prompt, str):
            ids = self._text_ids(prompt)
            rendered = Rendered(prompt, ids, [False] * len(ids))
        else:
            rendered = self.chat.prompt(prompt, tools)
        if not rendered.token_ids:
            raise BadRow("the prompt is empty (0 tokens)")
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

    def _conversation(self, prompt: list[Message], response: Any, tools: Any) -> Rendered:
        """Render a conversation whose learned turns are those of ``response``, or of ``prompt`` if that is None."""
        if response is None:
            return self.chat.conversation(prompt, tools=tools)
        turns = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        return self.chat.conversation([*prompt, *turns], len(prompt), tools)

    def _cut(self, row: Row, excess: int) -> Row | None:
        """Return ``row`` without its oldest exchange, or without about ``excess`` tokens of its oldest text.

        None: nothing can be cut.
        """
        if isinstance(row.prompt, str):
            text = self._without_first(row.prompt, excess)
            return replace(row, prompt=text) if text else None
        start = 1 if row.prompt[0]["role"] in ("system", "developer") else 0
        system, turns = row.prompt[:start], row.prompt[start:]
        later = [i for i, turn in enumerate(turns) if turn["role"] == "user" and i > 0]
        if later:
            return replace(row, prompt=[*system, *turns[later[0] :]])
        if not turns or turns[0]["role"] != "user":
            return None
        content = self._without_first(turns[0]["content"], excess)
        first = {**turns[0], "content": content}
        return replace(row, prompt=[*system, first, *turns[1:]]) if content else None

    def _without_first(self, text: str, count: int) -> str:
        """Return ``text`` without its first ``count`` tokens; without ``count`` characters if offsets are unknown."""
        if not self.tokenizer.is_fast:
            return text[count:]
        with tokenizing():
            encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return text[max(offsets[count][0], 1) :] if count < len(offsets) else ""

    def _ids(self, text: str, special: bool = False) -> list[int]:
        with tokenizing():
            encoded: Any = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return list(encoded["input_ids"])

    def _text_ids(self, text: str) -> list[int]:
        """Return token ids with the tokenizer's special tokens except an end of sequence: the text continues."""
        ids = self._ids(text, special=True)
        return ids[:-1] if self._adds_end else ids


def _longest(rendered: Sequence[Rendered]) -> int:
    return max(len(one.token_ids) for one in rendered)
