"""The simulated workers: they compute nothing, take the time that their speeds give, and answer like real workers."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import Batch, Request, Rollout, StepOutput, TrainOutput

if TYPE_CHECKING:
    from virtual_cluster.speeds import Lengths, Speeds


class SimulatedTrainer:
    """A rank of a trained model."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds

    def call(self, method: str, batch: Batch | None, plain: Mapping[str, Any]) -> tuple[Any, float]:
        """Return the answer of a method, and the seconds that it takes."""
        tokens = batch.num_tokens if batch is not None else 0
        if method == "infer":
            found = {name: torch.zeros(tokens) for name in plain["outputs"]}
            return found, tokens / (3 * self.speeds.train_rate)
        if method == "forward_backward":
            return TrainOutput(0.0, {"mismatch/mean_abs": 0.0}, 1), tokens / self.speeds.train_rate
        if method == "optimizer_step":
            return StepOutput(1.0, 1e-6), self.speeds.optimizer_seconds
        return None, 0.0  # mark, set_lr, ...


@dataclass(slots=True)
class Running:
    """A response in flight on one sampler."""

    request: Request
    length: int  # its final number of tokens
    begun: int  # tokens that it had when it arrived
    joined: int = 0  # the sampler's count of decoding steps when the response began here
    versions: Sequence[tuple[int, int]] = ()  # of the tokens that it had: (version, count)


class SimulatedSampler:
    """A sampler whose responses share its decoding steps, as in continuous batching.

    It counts the decoding steps since the beginning; a response of n tokens that joins at step s is done at s + n.
    """

    def __init__(self, speeds: Speeds, lengths: Lengths) -> None:
        self.speeds, self.lengths = speeds, lengths
        self.version = 0
        self.steps = 0
        self._changes = [(0, 0)]  # (step from which on, version)
        self._running: dict[str, Running] = {}
        self._ends: list[tuple[int, str]] = []  # step at which each is done, also of stopped ones
        self._waiting: deque[Running] = deque()

    def call(self, method: str, batch: Batch | None, plain: Mapping[str, Any]) -> tuple[Any, float]:
        """Return the answer of a method, and the seconds that it takes."""
        if method == "generate":
            self._add(plain["requests"])
            return self._generate()
        if method == "advance":
            return self._advance(**plain)
        return None, 0.0  # pause, resume, ...

    def update(self, version: int) -> None:
        """Set the version of later tokens."""
        self.version = version
        self._changes.append((self.steps, version))

    def _generate(self) -> tuple[list[Rollout], float]:
        found: list[Rollout] = []
        seconds = 0.0
        while self.unfinished:
            done, more = self._step(1 << 60)
            found, seconds = found + done, seconds + more
        return found, seconds

    def _advance(
        self,
        requests: Sequence[Request] = (),
        dropped: Sequence[str] = (),
        stopped: Sequence[str] = (),
        rounds: int = 1,
    ) -> tuple[list[Rollout], float]:
        self.take_in(requests, dropped)
        found = [self._rollout(each, "abort") for id in stopped if (each := self._forget(id))]
        seconds = 0.0
        for _ in range(0 if stopped else rounds):
            if self.unfinished:
                done, more = self._step(self.speeds.call_tokens)
                found, seconds = found + done, seconds + more
        return found, seconds

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            length = min(self.lengths.of(request.sampling.seed or 0), request.sampling.max_response_tokens)
            begun = request.begun
            had = begun.response_length if begun is not None else 0
            versions: list[tuple[int, int]] = []  # with the number of tokens of each
            if begun is not None:
                sampled = begun.policy_versions[begun.loss_mask]
                runs, counts = sampled.unique_consecutive(return_counts=True)
                versions = list(zip(runs.tolist(), counts.tolist(), strict=True))
            self._waiting.append(Running(request, length, had, versions=versions))

    def _forget(self, id: str) -> Running | None:
        found = self._running.pop(id, None)
        if found is None:
            found = next((each for each in self._waiting if each.request.id == id), None)
            if found is not None:
                self._waiting.remove(found)
                found.joined = self.steps
        return found

    def take_in(self, requests: Sequence[Request], dropped: Sequence[str]) -> None:
        """Queue ``requests`` and forget ``dropped``."""
        for id in dropped:
            self._forget(id)
        self._add(requests)

    @property
    def unfinished(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._running or self._waiting)

    def _step(self, most: int) -> tuple[list[Rollout], float]:
        """Sample until a response finishes, at most ``most`` tokens of each; return the finished ones and the seconds."""
        prefill, each, count = self.begin()
        count = min(count, most)
        return self.run(count), prefill + count * each

    def begin(self) -> tuple[float, float, int]:
        """Start waiting requests; return the seconds of new prompts, of a token, and the tokens until one finishes."""
        prompts: dict[str, int] = {}
        while self._waiting and len(self._running) < self.speeds.capacity:
            new = self._waiting.popleft()
            new.joined = self.steps
            prompts[new.request.prompt.id] = len(new.request.prompt.token_ids)
            if new.begun:
                prompts[new.request.id] = new.begun
            self._running[new.request.id] = new
            heapq.heappush(self._ends, (self.steps + new.length - new.begun, new.request.id))
        while self._over(self._ends[0]):
            heapq.heappop(self._ends)
        prefill = sum(prompts.values()) / self.speeds.prefill_rate
        return prefill, self.speeds.decode_step(len(self._running)), self._ends[0][0] - self.steps

    def run(self, count: int) -> list[Rollout]:
        """Sample ``count`` tokens of each response, at most as many as ``begin`` returned; return the finished ones."""
        self.steps += count
        done = []
        while self._ends and self._ends[0][0] <= self.steps:
            entry = heapq.heappop(self._ends)
            if not self._over(entry):
                done.append(self._rollout(self._running.pop(entry[1]), "stop"))
        return done

    def _over(self, entry: tuple[int, str]) -> bool:
        """Return whether an entry belongs to a response that was stopped."""
        end, id = entry
        found = self._running.get(id)
        return found is None or found.joined + found.length - found.begun != end

    def _rollout(self, of: Running, reason: str) -> Rollout:
        """Return the rollout of a response."""
        ids, count = of.request.prompt.token_ids, len(of.request.prompt.token_ids)
        sampled = self.steps - of.joined
        length = of.begun + sampled
        versions = torch.cat([torch.zeros(count, dtype=torch.int32), *self._versions(of, sampled)])
        if reason == "stop" and length >= of.request.sampling.max_response_tokens:
            reason = "length"
        return Rollout(
            request_id=of.request.id,
            prompt=of.request.prompt,
            token_ids=torch.cat([torch.tensor(ids), torch.full((length,), 2)]),
            loss_mask=torch.arange(count + length) >= count,
            rollout_log_probs=torch.zeros(count + length),
            policy_versions=versions,
            finish_reason=reason,
            group_id=of.request.group_id,
            index=of.request.index,
        )

    def _versions(self, of: Running, sampled: int) -> list[torch.Tensor]:
        parts = list(of.versions)
        end = of.joined + sampled
        mine: list[tuple[int, int]] = []
        for start, version in reversed(self._changes):
            if end > start:
                mine.append((version, end - max(start, of.joined)))
                end = max(start, of.joined)
            if start <= of.joined:
                break
        return [torch.full((n,), v, dtype=torch.int32) for v, n in (*parts, *reversed(mine)) if n]
