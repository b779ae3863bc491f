"""Contracts of a runtime: random calls of a sampler group, and random batches."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import DataError
from engine_core.sampler_session import SamplerSession
from engine_core.timeline import Clock
from engine_core.types import Batch, Prompt, Request, Rollout, Sampling
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.runtime_probe import described

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.contracts.runtime import WorkerGroup
    from engine_plugin_testing.runtime_bench import RuntimeBench

SEED, CALLS, SESSION_CALLS, BATCHES = 5, 60, 60, 30
PATIENCE = 20.0  # seconds
TIMEOUT = 100_000.0  # seconds of a request
FEW_IDS = 14  # so that an id is used again, also right after its request was dropped
COLUMNS = (torch.float64, torch.bfloat16, torch.int32, torch.bool)


class _Workload:
    """Requests of a sampler group, and a check of every rollout that comes back.

    Attributes:
        open: the requests that have no answer yet, by id.
        calls: the calls so far, for messages.
    """

    def __init__(self, group: WorkerGroup, draws: random.Random) -> None:
        self.group, self.draws = group, draws
        self.open: dict[str, Request] = {}
        self.calls: list[str] = []
        self.version = -1  # of the last push
        self.least: dict[str, int] = {}  # version that a request was made after, by id
        self.spent: set[str] = set()  # ids that are not used again
        self.begun: dict[str, list[int]] = {}  # tokens of requests that were stopped and go back, by id
        self._count = 0

    def new(self, most: int, **columns: Any) -> list[Request]:
        """Return at most so many requests whose ids are free; each has another prompt."""
        every = (f"r{i}" for i in range(FEW_IDS + len(self.spent)))
        free = [id for id in every if id not in self.open and id not in self.spent]
        ids = self.draws.sample(free, min(len(free), self.draws.randint(0, most)))
        return self._made(ids, columns)

    def more(self, count: int, **columns: Any) -> list[Request]:
        """Return so many requests with new ids."""
        return self._made([f"more{self._count + i}" for i in range(count)], columns)

    def _made(self, ids: Iterable[str], columns: dict[str, Any]) -> list[Request]:
        made, timeout = [], columns.pop("timeout_s", 0.0)
        for id in ids:
            self._count += 1
            prompt = Prompt("p", [self._count, *range(self.draws.randint(1, 5))], "", dict(columns))
            sampling = Sampling(max_response_tokens=2, timeout_s=timeout)
            made.append(Request(id, prompt, sampling, self._count, self._count % 3))
        self.open |= {request.id: request for request in made}
        self.least |= {request.id: self.version for request in made}
        self.begun = {id: tokens for id, tokens in self.begun.items() if id not in {r.id for r in made}}
        return made

    def some(self) -> list[str]:
        """Return ids of requests in flight, and at times one that is not."""
        ids = self.draws.sample(list(self.open), min(len(self.open), self.draws.randint(0, 3)))
        return [*ids, "unknown"] if self.draws.random() < 0.2 else ids

    def call(self, method: str, **plain: Any) -> list[Rollout]:
        """Call the samplers and note the call."""
        texts = {key: [getattr(each, "id", each) for each in value] if isinstance(value, list) else value
                 for key, value in plain.items()}  # fmt: skip
        self.calls.append(f"{method}({texts})")
        found: list[Rollout] | None = self.group.call(method, **plain).result()
        return found or []

    def finish(self, **rounds: int) -> None:
        """Advance until every request is answered; each call answers one."""
        while self.open:
            before = len(self.open)
            self.take(self.call("advance", **rounds))
            assert len(self.open) < before, (
                f"{sorted(self.open)} are never answered; the last calls: {self.calls[-6:]}."
            )

    def fail(self, method: str) -> None:
        """Sample requests, with nothing in flight, of which one raises an error, which the call must raise."""
        requests = [*self.new(4), *self.more(1, do="raise:DataError")]
        self.calls.append(f"{method} that fails of {[request.id for request in requests]}")
        error: Exception | None = None
        try:
            if method == "generate":
                self.group.call("generate", requests=requests).result()
            else:
                list(self.group.stream(requests))
        except DataError as raised:
            error = raised
        assert "requested failure" in str(error), f"{self.calls[-1]}: it raised {error!r}."
        self.open.clear()

    def take(self, found: Iterable[Rollout], ended: Iterable[str] = ()) -> None:
        """Check rollouts: each answers an open request, which this closes.

        Args:
            found: the rollouts of a call.
            ended: ids that the call stopped, so that each must be among the rollouts if its request is open.
        """
        stopped = {id for id in ended if id in self.open}
        calls = f" after {'; '.join(self.calls[-6:])}"
        for rollout in found:
            request = self.open.pop(rollout.request_id, None)
            assert request is not None, (
                f"'{rollout.request_id}' was answered although it is not in flight{calls}."
            )
            assert rollout.prompt is request.prompt, (
                f"'{rollout.request_id}' has the prompt of another request{calls}."
            )
            facts = (
                rollout.group_id,
                rollout.index,
                rollout.token_ids.tolist()[: len(request.prompt.token_ids)],
            )
            asked = (request.group_id, request.index, request.prompt.token_ids)
            assert facts == asked, f"'{rollout.request_id}': {facts}; expected {asked}{calls}."
            begun = self.begun.get(rollout.request_id, [])
            assert rollout.token_ids.tolist()[: len(begun)] == begun, (
                f"'{rollout.request_id}' does not begin with its tokens {begun} of before{calls}."
            )
            least, last = self.least[rollout.request_id], int(rollout.policy_versions[-1])
            assert self.version < 0 or rollout.finish_reason != "stop" or least <= last <= self.version, (
                f"'{rollout.request_id}' has version {last}; expected {least} to {self.version}{calls}."
            )
        assert not (left := stopped & set(self.open)), f"{sorted(left)} were stopped and not returned{calls}."


@contract(
    catches=(
        "a dropped request answered",
        "a dropped request sampled",
        "the prompt of an earlier request with the same id",
        "a stopped request without an answer",
        "requests of a call that failed sampled later",
        "the number of rounds lost",
    )
)
def random_calls_of_a_sampler_answer_each_request_once(bench: RuntimeBench) -> None:
    """In a random order of calls, each request is answered once, with its own prompt, or dropped and never sampled.

    The calls: ``advance`` with new, dropped and stopped requests; pushes of weights, ``generate``, and calls that fail at a
    request, when nothing is in flight. Ids of dropped and answered requests, and of those that failed, are used again at
    once.
    """
    runtime, groups, journal = bench.shared
    draws, group = random.Random(SEED), groups["rollout"]
    load = _Workload(group, draws)
    for number in range(CALLS):
        kind = draws.choice(("advance", "advance", "stop", "drop", "drop", "push", "all", "fail"))
        new = load.new(5) if kind not in ("push", "all", "fail") else []
        rounds = draws.randint(0, 2)
        if kind == "advance":
            least, found = min(rounds, len(load.open)), load.call("advance", requests=new, rounds=rounds)
            assert least <= len(found) <= rounds * group.world_size, (
                f"{load.calls[-1]} with {len(load.open)} requests in flight returned {len(found)} rollouts."
            )
            load.take(found)
        elif kind == "stop":
            stopped = load.some()
            load.take(load.call("advance", requests=new, stopped=stopped, rounds=rounds), stopped)
        elif kind == "drop":
            dropped = [id for id in load.some() if id not in {request.id for request in new}]
            gone = {tuple(load.open.pop(id).prompt.token_ids) for id in dropped if id in load.open}
            before = len(_sampled(bench, journal))
            load.take(load.call("advance", requests=new, dropped=dropped, rounds=3))
            load.take(load.call("advance", requests=load.new(3)))  # ids of dropped requests among them
            assert not (late := gone & set(_sampled(bench, journal)[before:])), (
                f"Prompts {sorted(late)} were sampled after they were dropped: {load.calls[-2]}."
            )
        else:
            load.finish()
            if kind == "push":
                load.version = number + 100
                load.calls.append(f"push_weights({load.version})")
                runtime.push_weights("actor", "rollout", load.version)
            elif kind == "fail":
                load.fail(draws.choice(("generate", "stream")))
            load.take(load.call("generate", requests=load.new(6)))
            assert not load.open, f"generate left {sorted(load.open)} unanswered."
    load.finish(rounds=2)


class _Clock(Clock):
    """A clock that stands still, except when it is set."""

    seconds = 0.0

    def now(self) -> float:
        """Return ``seconds``."""
        return self.seconds


class _Session(_Workload):
    """Random calls of a session of a run.

    Attributes:
        elapsed: seconds at each interruption, from the beginning on.
    """

    def __init__(self, bench: RuntimeBench, draws: random.Random) -> None:
        self.bench, self.clock = bench, _Clock()
        self.runtime, groups, self.journal = bench.shared
        super().__init__(groups["rollout"], draws)
        self.session = SamplerSession(groups["rollout"], self.clock)
        self.elapsed = [0.0]
        self.before = [len(lines) for lines in bench.written(self.journal, "rollout", "add")]

    def results(self, timeout: float = 0.0) -> None:
        """Take results."""
        self.take(self.session.results(timeout))

    def drop(self, ids: list[str]) -> None:
        """Drop requests."""
        self.spent |= {id for id in ids if self.open.pop(id, None)}
        self.session.submit([], ids)

    def cancel(self, ids: list[str]) -> None:
        """Cancel requests; one that was still queued in the session has no rollout."""
        self.take(self.session.cancel(ids))
        assert not (left := set(ids) & set(self.session.in_flight)), (
            f"{left} were cancelled and are in flight."
        )
        for id in ids:
            self.open.pop(id, None)

    def interrupt(self, _: list[str]) -> None:
        """Interrupt all requests that the samplers have, some time after the last interruption."""
        self.results()
        self.clock.seconds += self.draws.randint(1, 50)
        self.elapsed.append(self.clock.seconds)
        stopped = {rollout.request_id: rollout.token_ids.tolist() for rollout in self.session.interrupt()}
        assert stopped.keys() <= self.open.keys(), (
            f"{sorted(stopped)} were stopped; in flight are {sorted(self.open)}."
        )
        self.begun |= stopped

    def push(self, _: list[str]) -> None:
        """Change the weights while the session is held."""
        with self.session.held():
            self.version += 200
            self.runtime.push_weights("actor", "rollout", self.version)

    def drain(self, _: list[str]) -> None:
        """Change the weights when all requests have ended; those that are submitted meanwhile wait for the new ones."""
        left: list[list[str]] = []

        def change() -> None:
            """Wait for the requests so far, then push and submit others."""
            with self.session.drained():
                left.append(sorted(self.open.keys() & set(self.session.in_flight)))
                self.version += 200
                self.session.submit(self.new(3, do="sleep:0.002"))
                time.sleep(0.01)
                left.append(self.session.in_flight)
                self.runtime.push_weights("actor", "rollout", self.version)

        thread = threading.Thread(target=change, daemon=True)
        thread.start()
        deadline = time.monotonic() + PATIENCE
        while thread.is_alive() and time.monotonic() < deadline:
            self.results(timeout=0.01)
        assert not thread.is_alive(), f"A session is not drained after {PATIENCE} s: {sorted(self.open)}."
        assert left == [[], []], f"A drained session has requests in flight: {left}."

    def answered(self) -> None:
        """Take results until every request is answered."""
        deadline = time.monotonic() + PATIENCE
        while (self.open or not self.session.idle) and time.monotonic() < deadline:
            self.results(timeout=0.05)
        left = sorted({*self.open, *self.session.in_flight})
        assert not left, f"{left} were never answered; the last calls: {self.calls[-6:]}."

    def check_logs(self) -> None:
        """Assert that every rank has sampled, and that a request that was continued has the time that it had, less what has passed."""
        left: dict[int, list[float]] = {}
        every = self.bench.written(self.journal, "rollout", "add")
        for rank, (lines, count) in enumerate(zip(every, [*self.before, *[0] * len(every)], strict=False)):
            came = [pair for line in lines[count:] for pair in line["left"]]
            assert came, f"rollout[{rank}] received no request."
            for number, seconds in came:
                left.setdefault(number, []).append(seconds)
        for number, found in left.items():
            found.sort(reverse=True)
            possible = [
                [found[0] and TIMEOUT - (now - start) for now in self.elapsed[at : at + len(found)]]
                for at, start in enumerate(self.elapsed)
            ]
            assert found in possible, (
                f"Prompt {number} was continued {len(found) - 1} times with the timeouts {found}; interruptions: {self.elapsed}."
            )


@contract(
    catches=(
        "a drop that a flow sends to no sampler",
        "requests lost where they are shared out",
        "the whole timeout again at each continuation",
        "an interrupted request that begins again",
        "a drain that does not wait",
        "all requests given to one sampler",
        "a drop lost if a cancel follows it",
        "an error of a sampler that no caller gets",
    ),
)
def random_orders_of_a_session_answer_each_request_once(bench: RuntimeBench) -> None:
    """In a session of a run, each request is answered once, cancelled, or dropped and not sampled for long.

    Requests are submitted, dropped, cancelled and interrupted in a random order, while samplers work where the group has a flow.
    Weights change while the session is held or drained. Ids of answered and cancelled requests are used again at once. An
    interrupted request keeps its deadline. Every rank samples. An error of a sampler is raised.
    """
    draws = random.Random(SEED)
    load = _Session(bench, draws)
    try:
        for _ in range(SESSION_CALLS):
            kind = draws.choice(
                (load.results, load.results, load.drop, load.cancel, load.interrupt, load.push, load.drain)
            )
            timeout = draws.choice((0.0, TIMEOUT))
            new, ids = load.new(4, do="sleep:0.002", timeout_s=timeout), load.some()
            load.calls.append(f"{kind.__name__} of {ids}, after new {[request.id for request in new]}")
            load.session.submit(new)
            kind(*() if kind == load.results else (ids,))
            if draws.random() < 0.7:
                load.results(timeout=draws.choice((0.0, 0.01)))
        load.answered()
        load.check_logs()
        _check_drops(bench, load)
        load.session.submit(load.more(1, do="raise:DataError"))
        error: Exception | None = None
        try:
            load.answered()
        except DataError as raised:
            error = raised
        assert "requested failure" in str(error), f"A request that fails raised {error!r}."
        load.session.abandon()
    finally:
        load.session.close()


def _check_drops(bench: RuntimeBench, load: _Session) -> None:
    """Drop many requests at once, with another request or before a cancel, and assert that few of them are sampled."""
    for way in ("submit", "cancel"):
        many = load.more(60, do="sleep:0.01")
        before = len(_sampled(bench, load.journal))
        load.session.submit(many)
        load.results()
        load.drop([request.id for request in many])
        # a sampler that does not learn of the drop answers the two that follow after the dropped ones
        load.session.submit(load.more(2))
        if way == "cancel":
            load.cancel(["unknown"])
        load.answered()
        load.session.abandon()
        done = len(_sampled(bench, load.journal)) - before
        assert done < 50, f"{done} requests were sampled after 60 were dropped: no sampler knows."


def _sampled(bench: RuntimeBench, journal: Any) -> list[tuple[int, ...]]:
    """Return the prompts that the ranks have answered, in any order between ranks."""
    return [tuple(line["prompt"]) for lines in bench.written(journal, "rollout", "step") for line in lines]


@contract(
    catches=("an answer given to another call", "columns of one sequence lost"),
)
def random_batches_come_back_in_their_order(bench: RuntimeBench) -> None:
    """Results of random batches, sent to two roles without waiting, come back bit for bit in the order of each batch.

    Batches have 1 to 9 sequences of 1 to 40 tokens, so some have fewer sequences than ranks. Columns have random types
    and widths; sequences belong together in some batches.
    """
    _, groups, _ = bench.shared
    draws, made = random.Random(SEED), torch.Generator().manual_seed(SEED)
    sent: list[tuple[Batch, str, Any]] = []
    for _ in range(BATCHES):
        batch = _random_batch(bench, draws, made)
        role, split = draws.choice(("actor", "ref")), draws.choice(("dp", "dp", "all"))
        future = groups[role].call("infer", batch, split=split, outputs=("double", "columns"))
        sent.append((batch, f"{role}, {split}, lengths {batch.lengths.tolist()}", future))
    for batch, what, future in sent:
        found = future.result()
        assert torch.equal(found["double"], batch.token_ids.double() * 2), f"{what}: {found['double']}."
        for name, column in batch.tokens.items():
            assert described(found.get(name)) == described(column), f"{what}: '{name}' is {found.get(name)}."


def _random_batch(bench: RuntimeBench, draws: random.Random, made: torch.Generator) -> Batch:
    """Return sequences of random lengths with columns [T] and [T, K] of random types."""
    count = draws.randint(1, 9)
    batch = bench.batch([draws.randint(1, 40) for _ in range(count)])
    tokens = {}
    for number in range(draws.randint(0, 4)):
        width = draws.choice(((), (1,), (3,)))
        bits = torch.randint(0, 2**20, (batch.num_tokens, *width), generator=made)
        dtype = draws.choice(COLUMNS)
        tokens[f"c{number}"] = bits % 2 == 0 if dtype is torch.bool else (bits / 7).to(dtype)
    ids = batch.token_ids + draws.randint(0, 2**40)
    together = torch.tensor([draws.randint(0, 3) for _ in range(count)]) if draws.random() < 0.4 else None
    return dataclasses.replace(batch, token_ids=ids, tokens=tokens, keep_together=together)
