"""The questions to a judge: a template filled in with one sample, as the tokens of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.config.rewards import PLACEHOLDER
from engine_core.data.chat import ChatFormat
from engine_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.rewards import Asked

QUESTION = "question"


class Questions:
    """A template that is filled in and rendered for one model.

    Args:
        table: ``prompt`` and ``system``.
        tokenizer: the judge's; its chat template is used if it has one.
        where: the table's name, for messages.

    Raises:
        DataError: a system message, but no chat template that renders it.

    Attributes:
        names: columns that the template reads, by the names of a reward's arguments.
        required: columns that the data must have.
    """

    def __init__(self, table: Asked, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        self.table, self.tokenizer, self.where = table, tokenizer, where
        self._format = ChatFormat(tokenizer)
        if table.system is not None and not tokenizer.chat_template:
            raise DataError(
                f"{where}.system: the judge's tokenizer has no chat template. Write the text into prompt."
            )
        named = tuple(dict.fromkeys(PLACEHOLDER.findall(table.prompt)))
        self.required = tuple(name for name in named if name != QUESTION)
        asks = QUESTION in named
        self.names = (*named, "prompt", "messages") if asks else named

    def text(self, sample: Mapping[str, Any]) -> str | None:
        """Fill in the template, each value once and unchanged; return None if a value is missing.

        Args:
            sample: ``names``; columns that the data lacks are left out.
        """
        values = {name: sample.get(name) for name in self.required}
        values[QUESTION] = sample.get(QUESTION) or _question(sample)
        if any(values[name] is None for name in self.required):
            return None
        return PLACEHOLDER.sub(lambda found: _shown(values[found[1]]), self.table.prompt)

    def token_ids(self, text: str) -> list[int]:
        """Return the filled-in template as a prompt of the judge; with a chat template, control tokens are plain text.

        Raises:
            BadRow: the chat template or the tokenizer refuses it.
        """
        if not self.tokenizer.chat_template:
            return list(self.tokenizer(text)["input_ids"])
        system = [] if self.table.system is None else [{"role": "system", "content": self.table.system}]
        return self._format.prompt([*system, {"role": "user", "content": text}]).token_ids


def _question(sample: Mapping[str, Any]) -> Any:
    """Return the last message of the user, or the whole prompt if it is plain text."""
    asked = [m["content"] for m in sample.get("messages") or () if m["role"] == "user"]
    return asked[-1] if asked else sample.get("prompt")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
