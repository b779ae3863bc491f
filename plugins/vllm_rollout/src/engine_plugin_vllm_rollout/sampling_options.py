"""The sampling options under the names of vLLM, for the engine and for a server (no vLLM here: a server needs none)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.types import Sampling

PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The model's own distribution: a server takes other defaults from the model's folder."""


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Return what vLLM calls the options of a request, all but the number of tokens."""
    greedy = sampling.temperature == 0
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def kept_at_most(sampling: Sampling, vocabulary: int) -> int:
    """Return how many tokens a cut of the distribution can leave, from the options alone."""
    return min(sampling.top_k or vocabulary, vocabulary)
