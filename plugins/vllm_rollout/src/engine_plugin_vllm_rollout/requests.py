"""Requests as vLLM takes them, and what must be so before they are queued."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from engine_core.sampling import begun_ids
from engine_plugin_vllm_rollout.log_mass import KEY

if TYPE_CHECKING:
    from engine_core.types import Request, Sampling

HOTTEST = 2.0  # temperature, as vLLM's SamplingParams checks it


def too_long(table: str) -> str:
    """Return the hint for a prompt that the engine of ``[rollout]`` or ``[reward.judge]`` cannot hold."""
    lower = "data.max_prompt_tokens" if table == "rollout" else f"{table}.max_tokens"
    return f"Lower {lower}, or raise {table}.vllm.max_model_len where the model can hold more."


def tells_mass(sampling: Sampling, full: bool) -> bool:
    """Whether the rollout says how much top-p and top-k kept. ``full``: the engine can (``log_mass``)."""
    return full and sampling.log_probs and sampling.cuts


def support_width(sampling: Sampling, vocabulary: int, full: bool = False) -> int:
    """Return the number of log-probs of the likeliest tokens to request.

    One more than the largest reported support of top-p and top-k, or one for the likeliest token if only the kept
    mass is reported; 0 for none.
    """
    if not (sampling.max_support and sampling.cuts):
        return int(tells_mass(sampling, full))
    return min(sampling.max_support + 1, sampling.top_k or vocabulary, vocabulary)


def left_to_sample(request: Request, positions: int) -> int:
    """Return the number of tokens that may still be sampled.

    Args:
        request: a request, possibly one that continues a response.
        positions: tokens that the engine can hold, response included.
    """
    most = min(request.sampling.max_response_tokens, positions - len(request.prompt.token_ids))
    return most - len(begun_ids(request))


def _seed(sampling: Sampling, begun: int) -> int | None:
    """Return the seed; a continued response gets another one than it began with."""
    if sampling.seed is None or not begun:
        return sampling.seed
    text = f"{sampling.seed}:{begun}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def sampling_params(
    request: Request, positions: int, vocabulary: int, full: bool, seeded: bool = True
) -> SamplingParams:
    """Return vLLM's sampling parameters for a request.

    Args:
        request: the run's request.
        positions: tokens that the engine can hold, response included.
        vocabulary: number of token ids of the model.
        full: the engine can return the kept mass.
        seeded: the request has its own random numbers; else all requests draw from those of the engine.
    """
    sampling = request.sampling
    greedy = sampling.temperature == 0
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        max_tokens=left_to_sample(request, positions),
        seed=_seed(sampling, len(begun_ids(request))) if seeded else None,
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a stop string may be one
        detokenize=bool(sampling.stop),
        logprobs=support_width(sampling, vocabulary, full) if sampling.log_probs else None,
        flat_logprobs=True,
        extra_args={KEY: request.id} if tells_mass(sampling, full) else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
