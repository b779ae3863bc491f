"""Contracts of a runtime: random calls of a sampler group, and random batches."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import TYPE_CHECKING, Any

import torch

from engine_core.sampler_session import SamplerSession
from engine_core.types import Batch, Prompt, Request, Rollout, Sampling
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.runtime_probe import described

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_core.contracts.runtime import WorkerGroup
    from engine_plugin_testing.runtime_bench import RuntimeBench

SEED, CALLS, SESSION_CALLS, BATCHES = 5, 60, 60, 30
PATIENCE = 20.0  # seconds
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
        self.version: int | None = None  # of the last push
        self.spent: set[str] = set()  # ids that are not used again
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
        made = []
        for id in ids:
            self._count += 1
            prompt = Prompt("p", [self._count, *range(self.draws.randint(1, 5))], "", dict(columns))
            made.append(Request(id, prompt, Sampling(max_response_tokens=2), self._count, self._count % 3))
        self.open |= {request.id: request for request in made}
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
            if self.version is not None and rollout.finish_reason == "stop":
                assert rollout.policy_versions.tolist()[-1] == self.version, f"{rollout}{calls}"
        assert not (left := stopped & set(self.open)), f"{sorted(left)} were stopped and not returned{calls}."


@contract(
    catches=(
        "a dropped request answered",
        "a dropped request sampled",
        "the prompt of an earlier request with the same id",
        "a stopped request without an answer",
    )
)
def random_calls_of_a_sampler_answer_each_request_once(bench: RuntimeBench) -> None:
    """In a random order of calls, each request is answered once, with its own prompt, or dropped and never sampled.

    The calls: ``advance`` with new, dropped and stopped requests; pushes of weights and ``generate`` when nothing is in
    flight. Ids of dropped and answered requests are used again at once.
    """
    runtime, groups, journal = bench.shared
    draws, group = random.Random(SEED), groups["rollout"]
    load = _Workload(group, draws)
    for number in range(CALLS):
        kind = draws.choice(("advance", "advance", "stop", "drop", "drop", "push", "all"))
        new = load.new(5) if kind not in ("push", "all") else []
        rounds = draws.randint(1, 2)
        if kind == "advance":
            load.take(load.call("advance", requests=new, rounds=rounds))
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
            while load.open:
                load.take(load.call("advance"))
            if kind == "push":
                load.version = number + 100
                load.calls.append(f"push_weights({load.version})")
                runtime.push_weights("actor", "rollout", load.version)
            load.take(load.call("generate", requests=load.new(6)))
            assert not load.open, f"generate left {sorted(load.open)} unanswered."
    while load.open:
        before = len(load.open)
        load.take(load.call("advance", rounds=2))
        assert len(load.open) < before, (
            f"{sorted(load.open)} are never answered; the last calls: {load.calls[-6:]}."
        )


@contract(
    catches=("a drop that a flow sends to no sampler", "requests lost where they are shared out"),
)
def random_orders_of_a_session_answer_each_request_once(bench: RuntimeBench) -> None:
    """In a session of a run, each request is answered once, cancelled, or dropped and not sampled for long.

    Requests are submitted, dropped and cancelled in a random order, while samplers work where the group has a flow.
    Weights change while the session is held. Ids of answered and cancelled requests are used again at once.
    """
    runtime, groups, journal = bench.shared
    draws, session = random.Random(SEED), SamplerSession(groups["rollout"])
    load = _Workload(groups["rollout"], draws)
    try:
        for number in range(SESSION_CALLS):
            kind = draws.choice(("submit", "submit", "drop", "cancel", "push"))
            new, ids = load.new(4, do="sleep:0.002"), load.some()
            load.calls.append(f"{kind} of {ids}, after new {[request.id for request in new]}")
            session.submit(new)
            if kind == "drop":
                load.spent |= {id for id in ids if load.open.pop(id, None)}
                session.submit([], ids)
            elif kind == "cancel":
                load.take(session.cancel(ids))
                for id in ids:  # a request that was still queued in the session has no rollout
                    load.open.pop(id, None)
            elif kind == "push":
                with session.held():
                    runtime.push_weights("actor", "rollout", number + 200)
            load.take(session.results(timeout=draws.choice((0.0, 0.01))))
        many = load.more(60, do="sleep:0.01")
        before = len(_sampled(bench, journal))
        session.submit(many)
        load.take(session.results(timeout=0.0))
        # a sampler that does not learn of the drop answers the two that follow after the dropped ones
        session.submit(load.more(2), [request.id for request in many])
        load.open = {id: request for id, request in load.open.items() if request not in many}
        deadline = time.monotonic() + PATIENCE
        while (load.open or not session.idle) and time.monotonic() < deadline:
            load.take(session.results(timeout=0.05))
        assert not load.open, f"{sorted(load.open)} were never answered; the last calls: {load.calls[-6:]}."
        session.abandon()
        done = len(_sampled(bench, journal)) - before
        assert done < len(many) // 2, f"{done} requests were sampled after 60 were dropped: no sampler knows."
    finally:
        session.close()


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
