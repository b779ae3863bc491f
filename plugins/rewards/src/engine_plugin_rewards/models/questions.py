"""The questions to a judge as tokens, and the base of both kinds of judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.data.chat import ChatFormat
from engine_core.errors import DataError
from engine_plugin_rewards.judging import PLACEHOLDER, QUESTION, columns_of, filled
from engine_plugin_rewards.models.classifier import TokenReward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config.rewards import Asked


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
        self.required = columns_of(table.prompt)
        asks = QUESTION in PLACEHOLDER.findall(table.prompt)
        self.names = (*self.required, "prompt", "messages") if asks else self.required

    def text(self, sample: Mapping[str, Any]) -> str | None:
        """Fill in the template, each value once and unchanged; return None if a value is missing.

        Args:
            sample: ``names``; columns that the data lacks are left out.
        """
        return filled(self.table.prompt, sample)

    def token_ids(self, text: str) -> list[int]:
        """Return the filled-in template as a prompt of the judge; control tokens are plain text.

        Raises:
            BadRow: the chat template or the tokenizer refuses it.
        """
        if not self.tokenizer.chat_template:
            # the tokens that the tokenizer puts around a text, and between them the text without control tokens
            whole, inner = (
                list(self.tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (True, False)
            )
            starts = (i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
            start = next(starts, 0)
            return [*whole[:start], *self._format.text(text), *whole[start + len(inner) :]]
        system = [] if self.table.system is None else [{"role": "system", "content": self.table.system}]
        return self._format.prompt([*system, {"role": "user", "content": text}]).token_ids


class AskingReward(TokenReward):
    """A reward by a language model's answers to questions, which a subclass obtains.

    Args:
        questions: builds the questions to the model.
        limit: longest question in tokens.
    """

    def __init__(self, questions: Questions, limit: int) -> None:
        super().__init__(limit)
        self.questions, self.names, self.required = questions, questions.names, questions.required

    def tokens(self, sample: Mapping[str, Any]) -> list[int] | None:
        """Return the question about a sample."""
        text = self.questions.text(sample)
        return None if text is None else self.questions.token_ids(text)
