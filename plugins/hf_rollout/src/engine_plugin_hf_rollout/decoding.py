"""Sampling one batch to its end.

``generate`` of transformers would keep the scores of every step ([steps, batch, vocabulary]) to tell
log-probs, draws all rows from one generator, and carries finished rows to the end. This loop over the
same model and cache does none of that: prompts that several requests share are read once, log-probs
are gathered as tokens are drawn, and finished rows are put away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from engine_core.types import Request
from engine_plugin_hf_rollout.distribution import draw, log_distribution, uniforms

COMPACT_BELOW = 0.75  # rows are put away once fewer than this share still run


@dataclass
class Sampled:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # under the distribution sampled from
    log_mass: list[float] = field(default_factory=list)  # kept by top-p and top-k
    finish_reason: str = "length"


@dataclass
class Rows:
    """The rows that still run: per-row tensors and the cache, selected together."""

    number: Tensor  # [A] which request
    logits: Tensor  # [A, V] of the next token
    mask: Tensor  # [A, L] prompt padding and everything since
    position: Tensor  # [A] of the next token
    cache: DynamicCache

    def keep(self, running: Tensor) -> None:
        """Put the other rows away."""
        index = running.nonzero().flatten()
        self.number, self.logits = self.number[index], self.logits[index]
        self.mask, self.position = self.mask[index], self.position[index]
        self.cache.batch_select_indices(index)


def sample(
    module: nn.Module,
    requests: Sequence[Request],
    end_ids: frozenset[int],
    stopped: Callable[[Request, list[int]], bool],
    max_positions: int,
) -> list[Sampled]:
    """Sample all requests together.

    Args:
        module: a causal language model of transformers, in eval mode.
        requests: one row each.
        end_ids: tokens that end any sequence; a request's own come on top.
        stopped: whether the tokens of a response so far end in one of the request's stop strings.
        max_positions: tokens that the model can hold, prompt included.

    Returns:
        One result a request, in order.
    """
    device = next(module.parameters()).device
    plan = _Plan(requests, end_ids, max_positions, device)
    results = [Sampled() for _ in requests]
    rows = _prefill(module, requests, device)
    step = 0
    while True:
        log_probs, mass = log_distribution(rows.logits, *(column[rows.number] for column in plan.distribution))
        token = draw(log_probs, plan.uniform[rows.number, step], plan.greedy[rows.number])
        picked = log_probs.gather(1, token[:, None]).squeeze(1)
        ended = torch.isin(token, plan.ends) if plan.common else plan.ended(rows.number, token)
        finished = plan.finished[rows.number] | ended | (step + 1 >= plan.budget[rows.number])
        done = plan.finished[rows.number].tolist()  # rows that wait to be put away
        values = zip(*(t.tolist() for t in (rows.number, token, picked, mass, ended)), strict=True)
        for row, (number, drawn, log_prob, kept, end) in enumerate(values):
            if done[row]:
                continue
            result = results[number]
            result.tokens.append(drawn)
            result.log_probs.append(log_prob)
            result.log_mass.append(kept)
            if end or (requests[number].sampling.stop and stopped(requests[number], result.tokens)):
                result.finish_reason = "stop"
                finished[row] = True
        step += 1
        if bool(finished.all()):
            return results
        _forward(module, rows, token, finished, plan)


class _Plan:
    """Per-request numbers as tensors [B]."""

    def __init__(
        self, requests: Sequence[Request], end_ids: frozenset[int], max_positions: int, device: torch.device
    ) -> None:
        samplings = [request.sampling for request in requests]
        room = [max_positions - len(request.prompt.token_ids) for request in requests]
        budget = [min(s.max_response_tokens, r) for s, r in zip(samplings, room, strict=True)]
        self.budget = torch.tensor(budget, device=device)
        self.uniform = uniforms([s.seed for s in samplings], max(budget)).to(device)
        temperature = torch.tensor([s.temperature for s in samplings], device=device)
        top_p = torch.tensor([s.top_p for s in samplings], device=device)
        top_k = torch.tensor([s.top_k for s in samplings], device=device)
        self.distribution = (temperature, top_p, top_k)
        self.greedy = temperature == 0
        self.stops = [end_ids | set(s.stop_token_ids) for s in samplings]
        self.common = all(stops == self.stops[0] for stops in self.stops)
        self.ends = torch.tensor(sorted(self.stops[0]), device=device, dtype=torch.int64)
        self.finished = torch.zeros(len(requests), dtype=torch.bool, device=device)

    def ended(self, number: Tensor, token: Tensor) -> Tensor:
        """Where requests have end tokens of their own."""
        pairs = zip(number.tolist(), token.tolist(), strict=True)
        return torch.tensor([t in self.stops[n] for n, t in pairs], device=token.device)


def _prefill(module: nn.Module, requests: Sequence[Request], device: torch.device) -> Rows:
    """Read each distinct prompt once, padded on the left, and give every request its row."""
    prompts = [tuple(request.prompt.token_ids) for request in requests]
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    longest = max(map(len, distinct))
    ids = torch.zeros(len(distinct), longest, dtype=torch.int64)
    mask = torch.zeros(len(distinct), longest, dtype=torch.int64)
    for i, prompt in enumerate(distinct):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    cache = DynamicCache(config=module.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = module(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    row = torch.tensor([distinct[prompt] for prompt in prompts], device=device)
    cache.batch_select_indices(row)
    number = torch.arange(len(requests), device=device)
    return Rows(number, out.logits[:, -1][row], mask[row], positions[row, -1] + 1, cache)


def _forward(module: nn.Module, rows: Rows, token: Tensor, finished: Tensor, plan: _Plan) -> None:
    """One more token through the model; rows that are done are put away when enough of them are."""
    plan.finished[rows.number[finished]] = True
    running = ~plan.finished[rows.number]
    if int(running.sum()) < COMPACT_BELOW * len(running):
        rows.keep(running)
        token = token[running]
    rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(rows.mask), 1)], dim=1)
    out = module(
        input_ids=token[:, None],
        attention_mask=rows.mask,
        position_ids=rows.position[:, None],
        past_key_values=rows.cache,
        use_cache=True,
    )
    rows.logits, rows.position = out.logits[:, -1], rows.position + 1
