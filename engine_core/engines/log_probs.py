"""Log-probabilities, entropies and the like from hidden states, a few rows of logits at a time.

Logits of a batch in float32 are the largest tensor of training by far (16,384 tokens of a
vocabulary of 151,936: 10 GB). Here they exist for one chunk of rows at a time, in the backward pass
too, where each chunk is computed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

OTHER_LOGIT_KEYS = re.compile(r"logit|lm_head|output_multiplier")  # keys of a config that change logits
HARMLESS = re.compile(r"attn|attention|router|num_logits|return|classifier")


@dataclass(frozen=True)
class Head:
    """From hidden states to logits: ``cap(project(hidden) * scale)``."""

    project: nn.Module
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32."""
        logits = self.project(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits.float()


def find_head(module: nn.Module) -> Head | None:
    """The head of a transformers model as its config describes it; None where that is not known.

    Known keys: ``final_logit_softcapping`` (Gemma), ``logits_scaling`` (Granite divides by it),
    ``logit_scale`` (Cohere). Any other key that speaks of logits gives None.
    """
    config = getattr(module, "config", None)
    get_head = getattr(module, "get_output_embeddings", None)
    project = get_head() if get_head else None
    if project is None or not hasattr(config, "get_text_config"):
        return None
    values: dict[str, Any] = config.get_text_config(decoder=True).to_dict()  # type: ignore[union-attr]
    cap = values.pop("final_logit_softcapping", None)
    scale = (values.pop("logit_scale", None) or 1.0) / (values.pop("logits_scaling", None) or 1.0)
    unknown = [
        key
        for key, value in values.items()
        if OTHER_LOGIT_KEYS.search(key) and not HARMLESS.search(key) and value not in (None, False, 1.0)
    ]
    return None if unknown else Head(project, scale, cap)


def gather_outputs(
    logits_of: Callable[[Tensor], Tensor],
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    grad: Collection[str] = ("log_probs",),
    watched: Collection[str] = (),
) -> dict[str, Tensor]:
    """What a train engine computes of the distribution ``p = softmax(logits / temperature)``.

    Args:
        logits_of: [n, H] -> [n, V] float32; called on at most ``chunk`` rows.
        rows: [N, H], what ``logits_of`` takes.
        targets: [N] int64.
        temperature: over 0.
        chunk: rows whose logits exist at one time.
        grad: outputs with gradient, of ``OUTPUTS``; ``log_probs`` always have it.
        watched: outputs without.

    Returns:
        [N] float32 each: ``log_probs`` ``log p[target]`` always; ``entropy`` ``-sum_v p_v log p_v`` and
        ``sum_pi_squared`` ``sum_v p_v^2`` where asked for.
    """
    if temperature <= 0:
        raise ValueError(
            f"The temperature of log-probs is {temperature}; it must be over 0 (0 is for sampling)."
        )
    names = [name for name in OUTPUTS if name == "log_probs" or name in (*grad, *watched)]

    def one(part: Tensor, target: Tensor) -> Tensor:
        logits = logits_of(part)
        if temperature != 1.0:
            logits = logits / temperature
        log_sum = logits.logsumexp(-1)
        found = [logits.gather(-1, target[:, None]).squeeze(-1) - log_sum]
        for name in names[1:]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and name in grad):
                found.append(_OF_DISTRIBUTION[name](logits, log_sum))
        return torch.stack(found)

    pieces = [
        checkpoint(one, part, target, use_reentrant=False, preserve_rng_state=False)
        for part, target in zip(rows.split(chunk), targets.split(chunk), strict=True)
        if len(target)
    ]
    if not pieces:  # no row: zero of them, still part of the graph
        return dict.fromkeys(names, rows.float().sum(-1))
    return dict(zip(names, torch.cat(pieces, dim=1), strict=True))


def _entropy(logits: Tensor, log_sum: Tensor) -> Tensor:
    return log_sum - (torch.softmax(logits, -1) * logits).sum(-1)


def _sum_pi_squared(logits: Tensor, log_sum: Tensor) -> Tensor:
    return ((2 * logits).logsumexp(-1) - 2 * log_sum).exp()


_OF_DISTRIBUTION: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "entropy": _entropy,
    "sum_pi_squared": _sum_pi_squared,
}
"""Output -> its function of [n, V] logits and their [n] logsumexp."""

OUTPUTS = ("log_probs", *_OF_DISTRIBUTION)
