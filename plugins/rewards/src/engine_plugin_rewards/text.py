"""Rewards of the response as text: ``exact_match``, ``format``, ``length``."""

from __future__ import annotations

import re
from collections.abc import Callable


def exact_match(
    last_turn: str, answer: object, *, after: str | None, ignore_case: bool, strip: bool
) -> dict[str, float | str | None] | None:
    """Return 1 if the response is the answer, else 0; None for a row without answer. ``pred`` is the compared text.

    Args:
        last_turn: the response; in an episode the policy's last turn.
        answer: the column, compared as text.
        after: compare only what follows its last occurrence in the response.
        ignore_case: compare case-folded.
        strip: ignore white space at both ends.
    """
    if answer is None:
        return None
    if after is not None:
        _, found, last_turn = last_turn.rpartition(after)
        if not found:
            return {"score": 0.0, "pred": None}
    texts = [last_turn, str(answer)]
    if strip:
        texts = [text.strip() for text in texts]
    if ignore_case:
        texts = [text.casefold() for text in texts]
    return {"score": float(texts[0] == texts[1]), "pred": texts[0]}


def make_format(pattern: str, match: str) -> Callable[[str], float]:
    """Make a reward that is 1 if ``pattern`` matches the response, else 0.

    The reward's timeout stops a pattern that backtracks without end.
    """
    compiled = re.compile(pattern, re.DOTALL)
    matches = compiled.fullmatch if match == "full" else compiled.search

    def has_format(completion: str) -> float:
        """Return 1 if the pattern matches the response, else 0."""
        return float(matches(completion) is not None)

    return has_format


def soft_overlong(response_length: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return ``-clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1) * penalty``.

    DAPO, https://arxiv.org/abs/2503.14476, equation 13, with the penalty as a factor.

    Args:
        response_length: tokens after the prompt.
        max_tokens: length from which on the penalty is full.
        buffer_tokens: tokens before ``max_tokens`` over which the penalty grows.
        penalty: the full penalty.
    """
    over = (response_length - (max_tokens - buffer_tokens)) / buffer_tokens
    return 0.0 - min(max(over, 0.0), 1.0) * penalty
