"""A prompt and its response as the token ids that a reward model reads, and the position of its score.

A reward model was trained on whole sequences that end as its own chat template ends them (plain text: with the end of
sequence), and its score is read at the last token. Sequences are made in the same way here: sampled tokens are reused
if the tokenizers are the same, otherwise text is rendered again. Control tokens spelled out in a message or a response
are plain text, so that no response forges a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_core.data.chat import ChatFormat, Rendered
from engine_core.data.rows import BadRow
from engine_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

MARK = "\u2042 response \u2042"  # placeholder for a response, to find the tokens that follow one


class Sequences:
    """A maker of token ids for one reward model.

    Args:
        tokenizer: the reward model's.
        chat_template: render with it; None: only for rows that are conversations.
        end: extend a sequence to the end that the template writes.
        table: the table's name in the run file, for messages.

    Raises:
        DataError: the tokenizer lacks the required template or end of sequence.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: bool | None, end: bool, table: str
    ) -> None:
        self.tokenizer, self.chat_template, self.end, self.table = tokenizer, chat_template, end, table
        if chat_template and not tokenizer.chat_template:
            raise DataError(f"{table}.chat_template: its tokenizer has none. Remove the key.")
        if end and tokenizer.eos_token is None:
            raise DataError(
                f'{table}: its tokenizer has no end-of-sequence token, so nothing ends a sequence. Set score_at = "sampled".'
            )
        self._format = ChatFormat(tokenizer)
        self._end_ids: list[int] | None = None

    def from_tokens(self, token_ids: Sequence[int], conversation: bool) -> list[int]:
        """Return sampled tokens, ended as the template ends a response.

        Args:
            token_ids: prompt and response, by the reward model's tokenizer.
            conversation: the template rendered the prompt.
        """
        ids = list(token_ids)
        if not self.end:
            return ids
        ending = self._ending(conversation)
        return ids + (ending[1:] if ending and ids[-1:] == ending[:1] else ending)

    def from_text(self, prompt: str, messages: list[Message] | None, completion: str) -> list[int]:
        """Return the tokens of a prompt and its response; control tokens in messages and the response are plain text.

        Args:
            prompt: the prompt as the actor saw it; used if there are no messages.
            messages: the prompt's messages, if the row is a conversation.
            completion: the response.

        Raises:
            DataError: a conversation, but no template that renders it.
        """
        if messages is None and self.chat_template:
            messages = [{"role": "user", "content": prompt}]
        if messages is None or self.chat_template is False:
            ids = self._text_ids(prompt) + self._format.text(completion)
            return [*ids, self.tokenizer.eos_token_id] if self.end else ids
        begun = messages[-1]["role"] == "assistant"  # the response continues this turn
        before, start = (messages[:-1], str(messages[-1]["content"])) if begun else (messages, "")
        return self._rendered([*before, {"role": "assistant", "content": start + completion}]).token_ids

    def _ending(self, conversation: bool) -> list[int]:
        """Return the tokens that follow the last one of a response."""
        if not conversation:
            return [self.tokenizer.eos_token_id]
        if self._end_ids is None:
            asked = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": MARK}]
            self._end_ids = self._ids(self._rendered(asked).text.rpartition(MARK)[2])
        return self._end_ids

    def check_template(self) -> None:
        """Raise ``DataError`` if conversations cannot be rendered."""
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{self.table}: the rows are conversations, and its tokenizer has no chat template. Use a reward model "
                "that has one, or set chat_template = false to score the prompt as the actor saw it."
            )

    def _rendered(self, messages: list[Message]) -> Rendered:
        self.check_template()
        try:
            return self._format.whole(messages) if self.end else self._format.prompt(messages)
        except BadRow as error:
            raise DataError(f"{self.table}: {error}.") from error

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text_ids(self, text: str) -> list[int]:
        """Return the tokens with the tokenizer's special tokens, except an end of sequence, since the response follows."""
        ids, end = list(self.tokenizer(text)["input_ids"]), self.tokenizer.eos_token_id
        plain = self._ids(text)
        return ids[:-1] if ids[-1:] == [end] and plain[-1:] != [end] else ids
