"""The decoding loop that samples one batch.

``generate`` of transformers keeps the scores of every step ([steps, batch, vocabulary]) to return log-probs, draws
all rows from one generator, and computes finished rows to the end. This loop over the same model reads prompts that
several requests share once, gathers log-probs as tokens are drawn, and removes finished rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.sampling import begun_ids
from engine_core.types import SUPPORT, padded_support
from engine_plugin_hf_rollout.cache import make_cache, select_rows
from engine_plugin_hf_rollout.distribution import Distributions, draw, support, uniforms
from engine_plugin_torch.model_loading import accepts

if TYPE_CHECKING:
    from transformers import DynamicCache

    from engine_core.types import Request

log = logging.getLogger("engine")
COMPACT_BELOW = 0.75  # finished rows are removed once fewer than this share still run

Decode = Callable[[list[list[int]]], list[str]]


@dataclass
class Sampled:
    """The result of one request."""

    tokens: list[int]
    log_probs: list[float]  # under the distribution that was sampled from
    log_mass: list[float]  # log of the probability mass that top-p and top-k kept
    finish_reason: str
    support: Tensor | None = None  # [n, K] int32, if the request asks for it


class Decoding:
    """A batch in progress: its cache and the tokens sampled so far.

    Args:
        module: a module in eval mode: a causal language model of transformers, or a module whose ``forward(input_ids,
            position_ids)``, both [1, T], returns logits [1, T, V]. Without a cache, each token of the latter costs a
            pass over all tokens before it.
        requests: one row each; a request with ``begun`` continues as if it had never been stopped.
        end_ids: tokens that end any sequence, in addition to those of each request.
        decode: decodes token ids to texts with special tokens; called for rows with stop strings only.
        max_positions: most tokens of a sequence, including the prompt.

    Attributes:
        over: whether all requests are finished.
    """

    def __init__(
        self,
        module: nn.Module,
        requests: Sequence[Request],
        end_ids: frozenset[int],
        decode: Decode,
        max_positions: int,
    ) -> None:
        device = next(module.parameters()).device
        self._decode, self._step, self.over = decode, 0, False
        self._batch = _Batch(requests, end_ids, max_positions, device)
        cached = accepts(module, "past_key_values") and accepts(module, "attention_mask")
        begin = _prefill if cached else _Uncached.begin
        self._rows: _Cached | _Uncached = begin(module, requests, device)
        self._token: Tensor | None = None  # drawn, and not yet in the cache

    def advance(self, module: nn.Module, steps: int = 0) -> None:
        """Sample at most ``steps`` more tokens of each row, or with 0 until all requests are finished."""
        batch, rows, first = self._batch, self._rows, self._step
        while not self.over and (not steps or self._step < first + steps):
            if self._token is not None:
                rows.forward(module, self._token)
            token = batch.draw(rows, self._step)
            batch.finish(rows.number, token, self._step, self._decode)
            self._step += 1
            running = batch.running[rows.number]
            left = int(running.sum())
            self.over = not left
            if left and left < COMPACT_BELOW * len(running):
                rows.keep(running)
                token = token[running]
            self._token = token

    def running(self) -> list[bool]:
        """Return for each request whether it is unfinished."""
        found: list[bool] = self._batch.running.tolist()
        return found

    def stop(self, numbers: Sequence[int]) -> None:
        """Abort the requests with these numbers."""
        self._batch.stop(numbers)
        self.over = not bool(self._batch.running.any())

    def results(self, numbers: Sequence[int] | None = None) -> list[Sampled]:
        """Return the results so far of the requests with these numbers; default: all."""
        return self._batch.results(numbers)


@dataclass
class _Cached:
    """The rows that still run in a model with a cache: per-row tensors and the cache, selected together."""

    number: Tensor  # [A] number of the request
    logits: Tensor  # [A, V] for the next token
    mask: Tensor  # [A, L] attention mask: 0 for the padding of the prompt, else 1
    position: Tensor  # [A] position of the next token
    cache: DynamicCache

    def keep(self, running: Tensor) -> None:
        """Keep the rows where ``running: [A]`` is True and remove the others."""
        index = running.nonzero().flatten()
        self.number, self.logits = self.number[index], self.logits[index]
        self.mask, self.position = self.mask[index], self.position[index]
        select_rows(self.cache, index)

    def forward(self, module: nn.Module, token: Tensor) -> None:
        """Run one more token [A] of each row through the model."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        out = module(
            input_ids=token[:, None],
            attention_mask=self.mask,
            position_ids=self.position[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits, self.position = out.logits[:, -1], self.position + 1


@functools.cache
def _warn_uncached(name: str) -> None:
    log.warning(
        "%s is sampled without a cache, one sequence at a time, which is slow: its forward does not name past_key_values and "
        "attention_mask.",
        name,
    )


@dataclass
class _Uncached:
    """The rows that still run in a module without a cache, which reads one whole sequence at a time."""

    number: Tensor  # [A] number of the request
    logits: Tensor  # [A, V] for the next token
    tokens: list[Tensor]  # [L] tokens of each row

    @classmethod
    def begin(cls, module: nn.Module, requests: Sequence[Request], device: torch.device) -> _Uncached:
        """Read each distinct prompt once."""
        _warn_uncached(type(module).__name__)
        prompts = [tuple(request.prompt.token_ids + begun_ids(request)) for request in requests]
        read = {prompt: torch.tensor(prompt, device=device) for prompt in dict.fromkeys(prompts)}
        logits = {prompt: _last_logits(module, tokens) for prompt, tokens in read.items()}
        return cls(
            torch.arange(len(requests), device=device),
            torch.stack([logits[prompt] for prompt in prompts]),
            [read[prompt] for prompt in prompts],
        )

    def keep(self, running: Tensor) -> None:
        """Keep the rows where ``running: [A]`` is True and remove the others."""
        self.number, self.logits = self.number[running], self.logits[running]
        self.tokens = [row for row, runs in zip(self.tokens, running.tolist(), strict=True) if runs]

    def forward(self, module: nn.Module, token: Tensor) -> None:
        """Run one more token [A] of each row, and all tokens before it, through the module."""
        self.tokens = [torch.cat([row, new[None]]) for row, new in zip(self.tokens, token, strict=True)]
        self.logits = torch.stack([_last_logits(module, row) for row in self.tokens])


def _last_logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """Compute the logits [V] for the token after ``tokens`` [L]."""
    positions = torch.arange(len(tokens), device=tokens.device)
    out = module(input_ids=tokens[None], position_ids=positions[None])
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits[0, -1]


class _Batch:
    """The settings and results of each request: tensors [B] and [B, S + 1], where S is the longest response.

    Tokens of a finished row are still drawn until the row is removed. They are written behind its ``count`` and never
    read.
    """

    def __init__(
        self, requests: Sequence[Request], end_ids: frozenset[int], max_positions: int, device: torch.device
    ) -> None:
        samplings = [request.sampling for request in requests]
        room = [max_positions - len(request.prompt.token_ids) for request in requests]
        budget = [min(s.max_response_tokens, r) for s, r in zip(samplings, room, strict=True)]
        self.steps = max(budget)
        self.budget = torch.tensor(budget, device=device)
        begun = [begun_ids(request) for request in requests]
        self.start = torch.tensor([len(tokens) for tokens in begun], device=device)  # [B]
        self.uniform = uniforms([s.seed for s in samplings], self.steps).to(device)
        self.distributions = Distributions(samplings, device)
        ends = [sorted(end_ids | set(s.stop_token_ids)) for s in samplings]
        widest = max(map(len, ends))
        padded = [e + [-1] * (widest - len(e)) for e in ends]
        self.ends = torch.tensor(padded, dtype=torch.int64, device=device)  # [B, E]
        self.support_limits = [s.max_support if s.cuts else 0 for s in samplings]  # most tokens of a support
        self.widths = torch.tensor(self.support_limits, device=device)
        self.supports: list[tuple[Tensor, Tensor]] = []  # of each step: numbers [A] and tokens [A, K]
        self.stops = [s.stop for s in samplings]
        longest = max((len(stop) for stops in self.stops for stop in stops), default=0)
        # a character has up to 4 tokens; 2 more characters, because the tail may begin and end within one
        self.tail = 4 * (longest + 2)

        shape = (len(requests), self.steps + 1)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(shape, device=device)
        self.log_mass = torch.zeros(shape, device=device)
        self.count = self.start.clone()
        self.running = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self.aborted = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self.begun_supports: dict[int, Tensor] = {}
        for number, (request, tokens) in enumerate(zip(requests, begun, strict=True)):
            if tokens:
                self._begin(number, request, tokens)

    def _begin(self, number: int, request: Request, tokens: list[int]) -> None:
        """Fill in the tokens of a begun response as if this batch had sampled them."""
        assert request.begun is not None
        first, count = len(request.prompt.token_ids), len(tokens)
        self.tokens[number, :count] = torch.tensor(tokens)
        self.log_probs[number, :count] = request.begun.rollout_log_probs[first:]
        extras = request.begun.extras
        if "support_log_mass" in extras:
            self.log_mass[number, :count] = extras["support_log_mass"][first:]
        if SUPPORT in extras:
            self.begun_supports[number] = extras[SUPPORT][first:]

    def stop(self, numbers: Sequence[int]) -> None:
        """Mark the running requests with these numbers as aborted."""
        index = torch.tensor(numbers, dtype=torch.int64, device=self.running.device)
        self.aborted[index] = self.running[index]
        self.running[index] = False

    def draw(self, rows: _Cached | _Uncached, step: int) -> Tensor:
        """Draw the next token of each row: [A] int64."""
        number = rows.number
        at = (self.start[number] + step).clamp(max=self.steps)  # the spare column for a finished row
        log_probs, mass = self.distributions.of(rows.logits, number)
        token = draw(
            log_probs, self.uniform[number, at.clamp(max=self.steps - 1)], self.distributions.greedy[number]
        )
        self.tokens[number, at] = token
        self.log_probs[number, at] = log_probs.gather(1, token[:, None]).squeeze(1)
        self.log_mass[number, at] = mass
        if any(self.support_limits):
            self.supports.append((number.cpu(), support(log_probs, self.widths[number]).cpu()))
        return token

    def finish(self, number: Tensor, token: Tensor, step: int, decode: Decode) -> None:
        """Count the drawn token of each row; finish rows with an end token, a stop string or no room.

        ``number: [A]`` request of each row; ``token: [A]`` drawn token.
        """
        running = self.running[number]
        self.count[number] += running
        stopped = (token[:, None] == self.ends[number]).any(1)
        if any(self.stops):
            stopped |= self._stop_strings(number, running, step, decode)
        self.stopped[number] |= stopped & running
        self.running[number] &= ~stopped & (self.start[number] + step + 1 < self.budget[number])

    def _stop_strings(self, number: Tensor, running: Tensor, step: int, decode: Decode) -> Tensor:
        """Return whether the tail of each response contains a stop string: [A] bool. Earlier ones ended it before."""
        numbers = number.tolist()
        watched = [row for row, runs in enumerate(running.tolist()) if runs and self.stops[numbers[row]]]
        ends = (self.start[number] + step + 1).tolist()
        tails = [
            self.tokens[numbers[row], max(0, ends[row] - self.tail) : ends[row]].tolist() for row in watched
        ]
        found = torch.zeros_like(running)
        for row, text in zip(watched, decode(tails) if watched else [], strict=True):
            found[row] = any(stop in text for stop in self.stops[numbers[row]])
        return found

    def results(self, numbers: Sequence[int] | None = None) -> list[Sampled]:
        """Return the results of the requests with these numbers; an unfinished one has the reason ``abort``."""
        wanted = list(range(len(self.count)) if numbers is None else numbers)
        columns = (self.tokens, self.log_probs, self.log_mass, self.count, self.stopped)
        aborted = (self.aborted | self.running).tolist()
        rows = zip(wanted, zip(*(c[wanted].tolist() for c in columns), strict=True), strict=True)
        return [
            Sampled(
                tokens[:count],
                log_probs[:count],
                mass[:count],
                "abort" if aborted[number] else "stop" if stopped else "length",
                self._support(number, count) if self.support_limits[number] else None,
            )
            for number, (tokens, log_probs, mass, count, stopped) in rows
        ]

    def _support(self, request: int, count: int) -> Tensor:
        """Return the support of each token of a request: [count, K] int32, the tokens that it was drawn from."""
        start = int(self.start[request])
        before = self.begun_supports.get(request, torch.full((start, 0), -1, dtype=torch.int32))
        found = [ids[number == request] for number, ids in self.supports[: count - start]]
        found = [before, *(ids[:, : int((ids >= 0).sum())] for ids in found)]
        width = max((ids.shape[1] for ids in found), default=0)
        return torch.cat(
            [torch.empty(0, width, dtype=torch.int32), *(padded_support(i, width) for i in found)]
        )


def _prefill(module: nn.Module, requests: Sequence[Request], device: torch.device) -> _Cached:
    """Run each distinct prompt once, padded on the left, and copy its row to every request with that prompt."""
    prompts = [tuple(request.prompt.token_ids + begun_ids(request)) for request in requests]
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    longest = max(map(len, distinct))
    ids = torch.zeros(len(distinct), longest, dtype=torch.int64)
    mask = torch.zeros(len(distinct), longest, dtype=torch.int64)
    for i, prompt in enumerate(distinct):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    config: Any = module.config
    cache = make_cache(config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    last_alone = {"logits_to_keep": 1} if accepts(module, "logits_to_keep") else {}
    out = module(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **last_alone,
    )
    row = torch.tensor([distinct[prompt] for prompt in prompts], device=device)
    select_rows(cache, row)
    number = torch.arange(len(requests), device=device)
    return _Cached(number, out.logits[:, -1][row], mask[row], positions[row, -1] + 1, cache)
