"""The distribution of the next token, and reproducible draws from it.

Each request has separate uniform numbers, drawn from its seed before sampling begins. Token t is the inverse of the
cumulative distribution at the t-th number. The tokens of a request therefore do not depend on the rest of the batch,
as far as the model's logits do not. Their rounding may depend on the batch, and a number very close to the border of
two tokens may then choose the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine_core.types import Sampling


class Distributions:
    """The distributions of the requests of a batch, by their sampling options.

    Args:
        samplings: sampling options of each request.
        device: device of the logits.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        self.temperature = torch.tensor([float(s.temperature) for s in samplings], device=device)
        self.greedy = self.temperature == 0
        self.top_p = torch.tensor([s.top_p if s.temperature else 1.0 for s in samplings], device=device)
        self.top_k = torch.tensor([s.top_k if s.temperature else 0 for s in samplings], device=device)

    def of(self, logits: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``log_distribution`` of logits [A, V] of the requests ``number`` [A]."""
        return log_distribution(logits, self.temperature[number], self.top_p[number], self.top_k[number])


def log_distribution(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probs after temperature, top-k and top-p, and the log of the kept probability mass.

    Top-k is applied first, then top-p to the rest, as in transformers.

    Args:
        logits: [A, V].
        temperature: [A]; 0 means greedy choice, with the log-probs of temperature 1.
        top_p: [A], 1 keeps all.
        top_k: [A] int, 0 keeps all.

    Returns:
        Log-probs [A, V] float32, -inf where a token was cut; log mass [A] float32, 0 where nothing was cut.
    """
    scale = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    log_probs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    if bool((top_p >= 1).all()) and bool((top_k <= 0).all()):
        return log_probs, torch.zeros_like(temperature)
    ranked, order = log_probs.sort(dim=-1, descending=True)
    rank = torch.arange(ranked.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, ranked.shape[1])
    kept = rank[None] < limit[:, None]
    probs = ranked.exp() * kept
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs  # mass of more likely tokens: the token that crosses top_p is kept
    whole = top_p[:, None] >= 1  # explicit, because rounding may bring `before` to 1 ahead of the last token
    kept &= (before < top_p[:, None]) | whole | (rank == 0)
    ranked = ranked.masked_fill(~kept, -torch.inf)
    mass = ranked.logsumexp(-1)
    return torch.empty_like(ranked).scatter_(1, order, ranked - mass[:, None]), mass


def draw(log_probs: Tensor, uniform: Tensor, greedy: Tensor) -> Tensor:
    """Draw one token per row: the inverse of the cumulative distribution at ``uniform``.

    Exact to the rounding of float32: a token is drawn with its probability plus or minus 6e-8.

    Args:
        log_probs: [A, V], -inf where a token cannot be drawn.
        uniform: [A] in [0, 1).
        greedy: [A] bool; these rows take the most likely token.

    Returns:
        [A] int64.
    """
    cumulative = log_probs.exp().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    drawn = drawn.clamp(max=log_probs.shape[1] - 1)
    # rounding of parallel sums may make the cumulative sum rise at a token that was cut
    cut = log_probs.gather(1, drawn[:, None]).squeeze(1).isneginf()
    likeliest = greedy | cut
    return torch.where(likeliest, log_probs.argmax(-1), drawn) if bool(likeliest.any()) else drawn


def support(log_probs: Tensor, width: Tensor) -> Tensor:
    """Return the tokens that a distribution was cut to, the most likely first.

    Args:
        log_probs: [A, V], -inf where a token was cut.
        width: [A] int, most tokens of a support; a row that kept more tokens, or all of them, returns none.

    Returns:
        [A, K] int32, padded with -1; K is the size of the largest support.
    """
    count = (~log_probs.isneginf()).sum(-1)
    count = torch.where((count <= width) & (count < log_probs.shape[1]), count, 0)
    most = int(count.max())
    ids = log_probs.topk(most, dim=-1).indices.int()
    return ids.masked_fill(torch.arange(most, device=ids.device)[None] >= count[:, None], -1)


def uniforms(seeds: Sequence[int | None], count: int) -> Tensor:
    """Return numbers [B, count] in [0, 1), each row from its seed, or from torch's generator without a seed."""
    rows = []
    for seed in seeds:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        rows.append(torch.rand(count, generator=generator))
    return torch.stack(rows)
