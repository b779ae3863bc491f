"""Statistics of drawn tokens against the reference: whether a sample is of the distribution that it should be of.

Token t of a response is drawn from a distribution p_t over tokens 0 to V - 1, given the tokens before it. Under it,
``log p_t(token)`` minus its expectation, and ``v_t - 1/2``, have the mean 0 and known variances, also given all earlier
tokens. Here ``v_t = F_t(token - 1) + u p_t(token)`` with the cumulative distribution ``F_t`` and an independent uniform
``u``: uniform in [0, 1) (the randomized probability integral transform).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine_plugin_testing.contracts import close
from engine_plugin_testing.reference import logits_of
from engine_plugin_testing.rollout_cuts import cuts

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout, Sampling

SIGMAS = 5.0  # chance of a false alarm below one in a million
TOKEN_LAGS = (1, 2, 3, 4)  # distances of tokens of one response that must be independent
REQUEST_LAGS = (1, 2, 3, 4, 8, 16, 32, 64)  # distances of requests whose tokens must be independent


@torch.no_grad()
def rows_of_response(module: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Return the log-probs [N, V] of the distribution of each of the N tokens of a response, nothing cut."""
    logits = logits_of(module, rollout.token_ids)[rollout.prompt_length - 1 : -1]
    return torch.log_softmax(logits.double() / (temperature or 1.0), -1)


def chosen(rows: Tensor, rollout: Rollout) -> Tensor:
    """Return the log-prob [N] of each token of a response in its row of ``rows`` [N, V]."""
    tokens = rollout.token_ids[rollout.prompt_length :]
    return rows.gather(1, tokens[:, None]).squeeze(1)


def places_of(rows: Tensor, tokens: Tensor, uniform: torch.Generator) -> Tensor:
    """Return ``v_t - 1/2`` [N] of the tokens of a response.

    Args:
        rows: [N, V] log-probs of the distributions.
        tokens: [N] int64, drawn from them.
        uniform: generator of ``u``.
    """
    probs = rows.exp()
    share = probs.gather(1, tokens[:, None]).squeeze(1)
    below = probs.cumsum(1).gather(1, tokens[:, None]).squeeze(1) - share
    return below + share * torch.rand(len(tokens), generator=uniform, dtype=torch.float64) - 0.5


def check_draws(
    module: nn.Module, requests: Sequence[Request], rollouts: Sequence[Rollout], tolerance: float, what: str
) -> None:
    """Assert that log-probs are the reference's and that tokens are independent draws from its distributions.

    Args:
        module: the reference.
        requests: requests with a temperature above 0.
        rollouts: their rollouts, in the same order.
        tolerance: largest difference of a log-prob, in nats.
        what: context for the failure's message.
    """
    drawn = []
    for request, rollout in zip(requests, rollouts, strict=True):
        rows, sampling = rows_of_response(module, rollout, request.sampling.temperature), request.sampling
        tokens, found = (
            column[rollout.prompt_length :] for column in (rollout.token_ids, rollout.rollout_log_probs)
        )
        if sampling.cuts:
            rows = torch.stack(
                [
                    _nearest(row, sampling, int(t), float(f), tolerance)
                    for row, t, f in zip(rows, tokens, found, strict=True)
                ]
            )
        close(found, chosen(rows, rollout), tolerance, f"rollout_log_probs of '{request.id}' {what}")
        drawn.append((rows, tokens))
    check_independent(drawn, what)


def check_independent(drawn: Sequence[tuple[Tensor, Tensor]], what: str) -> None:
    """Assert that tokens are independent draws from their distributions.

    Args:
        drawn: for each response the log-probs [N, V] of the distributions, and the tokens [N].
        what: context for the failure's message.
    """
    uniform = torch.Generator().manual_seed(7)
    surprise, spread, places = 0.0, 0.0, []
    for rows, tokens in drawn:
        probs = rows.exp()
        weighed = torch.where(probs > 0, probs * rows, 0.0)
        mean = weighed.sum(1)
        surprise += float((rows.gather(1, tokens[:, None]).squeeze(1) - mean).sum())
        spread += float(torch.where(probs > 0, weighed * rows, 0.0).sum() - (mean**2).sum())
        places.append(places_of(rows, tokens, uniform))
    every, later = torch.cat(places), torch.cat([place[1:] for place in places])
    sums = [
        ("log-probs: is temperature or a cut ignored?", surprise, spread),
        ("places in the distribution", float(every.sum()), len(every) / 12),
        ("places of later tokens", float(later.sum()), len(later) / 12),
        ("spread of the places", float((every**2 - 1 / 12).sum()), len(every) / 180),
        ("spread of the places of later tokens", float((later**2 - 1 / 12).sum()), len(later) / 180),
    ]
    for name, pairs in _pairs(places).items():
        sums.append((f"independence of {name}", float(pairs.sum()), len(pairs) / 144))
    for name, total, variance in sums:
        sigmas = total / max(variance, 1e-12) ** 0.5
        assert abs(sigmas) <= SIGMAS, (
            f"{len(every)} tokens {what} are not drawn from the reference's distributions: {sigmas:+.1f} standard "
            f"deviations off in the {name}."
        )


def _pairs(places: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return products [P] of the places of two tokens that must be independent, by what the two are.

    Args:
        places: for each request [N], with the mean 0.
    """
    found = {}
    for lag in TOKEN_LAGS:
        found[f"a token of the one {lag} before it"] = [place[lag:] * place[:-lag] for place in places]
    for lag in REQUEST_LAGS:
        two = list(zip(places, places[lag:], strict=False))
        found[f"a request of the one {lag} before it"] = [a[: len(b)] * b[: len(a)] for a, b in two]
    for name, others in (("next", places[1:]), ("former", places[-2::-1])):
        first = places if name == "next" else places[::-1]
        moved = [(a[1:], b) for a, b in zip(first, others, strict=False)]
        found[f"a token of the one before it in the {name} request"] = [
            a[: len(b)] * b[: len(a)] for a, b in moved
        ]
    return {name: torch.cat(products) for name, products in found.items() if products}


def _nearest(row: Tensor, sampling: Sampling, token: int, found: float, tolerance: float) -> Tensor:
    """Return the log-probs [V] of the correct cut whose log-prob of ``token`` is nearest to ``found``.

    Args:
        row: [V] log-probs at the temperature.
    """
    right = cuts(row * sampling.temperature, sampling, tolerance)
    apart = [abs(found - float(cut.log_probs[token])) for cut in right]
    return right[apart.index(min(apart))].log_probs
