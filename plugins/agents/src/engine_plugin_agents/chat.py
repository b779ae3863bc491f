"""Messages that follow a sampled turn, as tokens: what the chat template writes for them and nothing else.

A conversation is not rendered again: the template is applied to a short conversation of our own, with and
without the new messages, and the difference is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_core.errors import DataError

BEFORE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text in the middle of a sequence, without the special tokens that begin or end one."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def following(tokenizer: Any, messages: Sequence[dict[str, str]], ended: bool) -> list[int]:
    """Tokens of messages after an assistant's turn, up to where the assistant speaks again.

    Args:
        tokenizer: with a chat template.
        messages: ``{"role": "tool", "content": "84"}``; any roles that the template knows.
        ended: the turn ends with the end of sequence; else it is written first, as the template would.

    Raises:
        DataError: there is no template, or none that leaves earlier messages as they were.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "The tokenizer has no chat template, so messages cannot be appended. Use episode.append(text)."
        )
    before = tokenizer.apply_chat_template(BEFORE, tokenize=False)
    after = tokenizer.apply_chat_template([*BEFORE, *messages], tokenize=False, add_generation_prompt=True)
    if not after.startswith(before):
        raise DataError(
            "The chat template writes earlier messages differently once others follow, so messages cannot be "
            "appended to what was sampled. Use episode.append(text) with the text that the model expects."
        )
    end = str(tokenizer.eos_token)
    at = before.rfind(end)
    start = len(before) if at < 0 else at + (len(end) if ended else 0)
    return encode(tokenizer, after[start:])
