"""What a request must be before a sampler queues it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from engine_core.errors import DataError

if TYPE_CHECKING:
    from engine_core.types import Request, Sampling


def check_request(
    request: Request,
    taken: Collection[str],
    vocabulary: int,
    max_positions: int,
    *,
    holder: str = "the model",
    instead: str = "Lower data.max_prompt_tokens.",
    hottest: float = math.inf,
) -> None:
    """Refuse a malformed request.

    Args:
        request: the one to look at.
        taken: ids of requests that wait.
        vocabulary: token ids that the model has.
        max_positions: tokens that can be held, response included.
        holder: of them, for messages.
        instead: what to do where a prompt is too long.
        hottest: temperature that the sampler takes.

    Raises:
        DataError: its prompt cannot be continued.
        ValueError: its id is taken, its sampling makes no sense, or it goes on with a response that is over or another's.
    """
    ids, where = request.prompt.token_ids, f"Request '{request.id}' (prompt '{request.prompt.id}')"
    if request.id in taken:
        raise ValueError(f"{where} is queued already. Requests must have distinct ids.")
    if not ids:
        raise DataError(f"{where} has no tokens. An empty prompt cannot be continued; give it a start token.")
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(i for i in ids if not 0 <= i < vocabulary)
        raise DataError(
            f"{where} has token {wrong}, and the model knows 0 to {vocabulary - 1}. Check the tokenizer."
        )
    if len(ids) >= max_positions:
        raise DataError(
            f"{where} has {len(ids)} tokens, and {holder} holds {max_positions} with the response. {instead}"
        )
    if request.begun is not None and (wrong_start := _begun_problem(request, max_positions)):
        raise ValueError(f"{where} goes on with a response that {wrong_start}.")
    if problem := _sampling_problem(request.sampling, hottest):
        raise ValueError(f"{where} has {problem}.")


def _begun_problem(request: Request, max_positions: int) -> str:
    assert request.begun is not None
    prompt, ids = request.prompt.token_ids, request.begun.token_ids
    if ids[: len(prompt)].tolist() != prompt:
        return "has another prompt"
    most = min(request.sampling.max_response_tokens, max_positions - len(prompt))
    if len(ids) - len(prompt) >= most:
        return f"has {len(ids) - len(prompt)} tokens, and {most} at most are asked for: nothing is left to sample"
    return ""


def _sampling_problem(sampling: Sampling, hottest: float) -> str:
    if not 0 <= sampling.temperature <= hottest or math.isinf(sampling.temperature):
        most = "or more" if math.isinf(hottest) else f"to {hottest:g}, the most that the sampler takes"
        return f"temperature {sampling.temperature}; expected 0 (greedy) {most}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p}; expected more than 0 and at most 1 (all tokens)"
    if sampling.top_k < 0:
        return f"top_k {sampling.top_k}; expected 0 (all tokens) or more"
    if sampling.max_response_tokens < 1:
        return f"max_response_tokens {sampling.max_response_tokens}; expected 1 or more"
    if "" in sampling.stop:
        return "an empty stop string, which every text contains; remove it"
    return ""
