"""Rendering of a `Row` to token ids: the chat template, and rows that are too long.

Text without a template is tokenized with the tokenizer's default special tokens. Text from a template is
tokenized without them, because the template writes special tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.data.chat import ChatFormat, Rendered, tokenizing
from engine_core.data.layouts import Row, with_system
from engine_core.data.rows import BadRow
from engine_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.models import DataConfig


class OverLong(Exception):
    """A row exceeds its limit. ``length`` is in tokens."""

    def __init__(self, length: int) -> None:
        self.length = length
        super().__init__(f"{length} tokens")


class Renderer:
    """A renderer of rows for one tokenizer and one ``[data]`` table, to prompts to sample from."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.chat = ChatFormat(tokenizer, config.control_tokens, config.chat_template_kwargs)
        added, end = list(tokenizer("")["input_ids"]), tokenizer.eos_token_id
        self._adds_end = added[-1:] == [end] and (len(added) > 1 or tokenizer.bos_token_id != end)

    def fit(self, row: Row, limit: int) -> Rendered:
        """Render ``row`` in at most ``limit`` tokens.

        Raises:
            BadRow: the row cannot be rendered.
            OverLong: the row is longer.
        """
        rendered = self.render(self._prepare(row))
        if len(rendered.token_ids) > limit:
            raise OverLong(len(rendered.token_ids))
        return rendered

    def _prepare(self, row: Row) -> Row:
        """Return ``row`` with the system message, as a conversation if the chat template is used."""
        plain, use = isinstance(row.prompt, str), self.config.chat_template
        if use or (use is None and not plain):
            turns = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
            return replace(row, prompt=with_system(turns, self.config.system))
        if not plain:
            raise DataError("[data] chat_template is false, but a row is a conversation. Remove the key.")
        for key in ("system", "chat_template_kwargs"):
            if getattr(self.config, key) not in (None, {}):
                raise DataError(
                    f"[data] {key} needs a chat template, and rows of plain text are rendered without one. "
                    "Set chat_template = true in [data], or remove the key."
                )
        return row

    def render(self, row: Row) -> Rendered:
        """Render a row that has its system message.

        Raises:
            BadRow: the prompt is empty.
        """
        prompt = row.prompt
        if isinstance(prompt, str):
            ids = self._text_ids(prompt)
            rendered = Rendered(prompt, ids, [False] * len(ids))
        else:
            rendered = self.chat.prompt(prompt, row.columns.get("tools"))
        if not rendered.token_ids:
            raise BadRow("the prompt is empty (0 tokens)")
        return rendered

    def _ids(self, text: str, special: bool = False) -> list[int]:
        with tokenizing():
            return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _text_ids(self, text: str) -> list[int]:
        """Return token ids with the tokenizer's special tokens except an end of sequence: the text continues."""
        ids = self._ids(text, special=True)
        return ids[:-1] if self._adds_end else ids
