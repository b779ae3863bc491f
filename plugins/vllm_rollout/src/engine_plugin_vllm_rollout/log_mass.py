"""A logits processor that records the mass kept by top-p and top-k, which vLLM does not return.

vLLM returns log-probs ``log q`` under the distribution that was sampled from, after temperature and cut. Those of the
whole distribution are ``log p = log q + log m`` with the kept mass m. The likeliest token is always kept, so
``log m`` is the difference of its two values: ``log p`` is recorded here, in vLLM's own step, before the cut; ``log q`` is
among what vLLM returns.

The processor implements vLLM's documented interface and changes no logit. It runs where the model runs, possibly in
another process, and its records are fetched through vLLM's worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate

KEY = "engine_request"
"""In ``SamplingParams.extra_args``: under which name a request's log-probs are noted."""


class LogMass(LogitsProcessor):
    """Notes ``log p`` of the likeliest token, after temperature and before the cut, for requests that have ``KEY``."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[str, list[int]]] = {}  # row of the batch -> key, tokens sampled so far
        self._steps: list[tuple[list[tuple[str, int]], Tensor]] = []  # not yet brought to the host
        self._noted: dict[str, dict[int, float]] = {}  # key -> position in the response -> log-prob

    def is_argmax_invariant(self) -> bool:
        """No logit changes. vLLM runs such processors between temperature and cut, for what is not greedy."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they come, go and change rows, in the order that vLLM's interface gives."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, sampled in batch_update.added:
            self._rows.pop(row, None)
            if (key := (params.extra_args or {}).get(KEY)) is not None:
                self._rows[row] = (key, sampled)
        for one, other, direction in batch_update.moved:
            mine, theirs = self._rows.pop(one, None), self._rows.pop(other, None)
            if mine is not None:
                self._rows[other] = mine
            if theirs is not None and direction is MoveDirectionality.SWAP:
                self._rows[one] = theirs

    def apply(self, logits: Tensor) -> Tensor:
        """Note a value a row; a prompt that is read in parts notes the same position again.

        Args:
            logits: [B, V] float32, divided by the temperature.
        """
        if self._rows:
            rows = [row for row in self._rows if row < len(logits)]
            places = [(key, len(sampled)) for key, sampled in map(self._rows.__getitem__, rows)]
            self._steps.append((places, (logits.amax(-1) - logits.logsumexp(-1))[rows]))
        return logits

    def take(self, keys: Sequence[str]) -> dict[str, list[float]]:
        """Return and remove the recorded log-probs of these requests, by position in the response."""
        if self._steps:
            values = torch.cat([step for _, step in self._steps]).tolist()
            places = [place for step, _ in self._steps for place in step]
            for (key, at), value in zip(places, values, strict=True):
                self._noted.setdefault(key, {})[at] = value
            self._steps.clear()
        taken = {key: self._noted.pop(key, {}) for key in keys}
        return {key: [noted[at] for at in sorted(noted)] for key, noted in taken.items()}


def log_mass(likeliest: Sequence[float], returned: Sequence[Sequence[float]]) -> list[float]:
    """``log m`` of each token, at most 0.

    Args:
        likeliest: ``log p`` of the likeliest token at each position; those behind the response are left out.
        returned: what vLLM returned at each position, ``log q`` of the likeliest token among it.

    Raises:
        RuntimeError: a position is missing.
    """
    if len(likeliest) < len(returned):
        raise RuntimeError(f"vLLM noted {len(likeliest)} of {len(returned)} tokens before the cut.")
    return [min(0.0, p - max(q)) for p, q in zip(likeliest, returned, strict=False)]
