"""Episodes as requests of a session: new weights wait for turns and not for tools, and nothing is lost or doubled."""

import contextlib
import dataclasses
import threading
import time

import pytest
import torch

from engine_core.contracts.engines import RolloutEngine
from engine_core.local.runtime import LocalGroup
from engine_core.sampler_session import SamplerSession
from engine_core.types import Rollout


class Letters(RolloutEngine):
    """One token a request and step: the letters in order, up to the request's longest response."""

    def __init__(self, tokenizer):
        super().__init__(None, None, None)
        self.tokenizer, self.queue, self.late = tokenizer, {}, set()

    def add(self, requests):
        for request in requests:
            before, begun = len(request.prompt.token_ids), request.begun
            tokens = [] if begun is None else begun.token_ids[before:].tolist()
            versions = [] if begun is None else begun.policy_versions[before:].tolist()
            self.queue[request.id] = (request, tokens, versions)

    @property
    def num_unfinished(self):
        return len(self.queue)

    def step(self):
        time.sleep(0.001)
        for _, tokens, versions in self.queue.values():
            letter = "abcdefghijklmnopqrstuvwxyz"[len(tokens) % 26]
            tokens += self.tokenizer(letter, add_special_tokens=False)["input_ids"]
            versions.append(self.version)
        ended = [id for id, (r, tokens, _) in self.queue.items() if self.over(r, tokens)]
        return [self.take(id, "abort" if id in self.late else "stop") for id in ended]

    def over(self, request, tokens):
        return request.id in self.late or len(tokens) >= request.sampling.max_response_tokens

    def abort(self, ids):
        return [self.take(id, "abort") for id in ids if id in self.queue]

    def update_weights(self, stream, version):
        raise NotImplementedError

    def take(self, id, reason):
        request, tokens, versions = self.queue.pop(id)
        before = len(request.prompt.token_ids)
        return Rollout(
            id,
            request.prompt,
            torch.tensor(request.prompt.token_ids + tokens),
            torch.arange(before + len(tokens)) >= before,
            torch.zeros(before + len(tokens)),
            torch.tensor([0] * before + versions, dtype=torch.int32),
            reason,
            request.group_id,
            request.index,
            failure="timeout" if id in self.late else "",
        )


@pytest.fixture
def driven(environment, tokenizer):
    """``driven(source, **settings)``: engine, session and the list of its rollouts, which a thread fills."""
    with contextlib.ExitStack() as stack:

        def make(source, **settings):
            engine = Letters(tokenizer)
            session = environment(source, **settings).session(SamplerSession(LocalGroup(engine)))
            found, closed = [], threading.Event()

            def drive():
                while not closed.is_set():
                    found.extend(session.results())

            thread = threading.Thread(target=drive, daemon=True)
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(session.close)
            stack.callback(closed.set)
            return engine, session, found

        yield make


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


TWO_TURNS = """
first, second, ready = threading.Event(), threading.Event(), []

async def mine(episode):
    await episode.sample()
    ready.append(episode.policy.request.id)
    episode.append(await episode.call(first.wait, 60))
    await episode.sample()
    return episode.rollout()
"""


def module_of(session):
    return session.game.play.__closure__[0].cell_contents.__globals__


def test_a_drain_waits_for_turns_and_not_for_tools(driven, requests):
    engine, session, found = driven(TWO_TURNS, tool_timeout_seconds=60)
    session.submit(requests(2))
    events = module_of(session)
    until(lambda: len(events["ready"]) == 2)  # both wait for their tools
    long = [dataclasses.replace(r, id="1:7:0") for r in requests(1, max_response_tokens=40)]
    session.submit(long)
    until(lambda: engine.queue)
    with session.turns.drained():
        assert not engine.queue  # the long turn is over, with the old weights
        assert session.in_flight == ["1:0:0", "1:0:1", "1:7:0"]
        engine.version = 1
        events["first"].set()  # now they ask for their second turns
        until(lambda: len(session._futures) == 3)
        time.sleep(0.02)
        assert not engine.queue  # and wait
    until(lambda: len(found) == 3)
    for rollout in found:
        versions = [
            rollout.policy_versions[rollout.loss_mask & (rollout.extras["turns"] == n)] for n in (1, 2)
        ]
        assert [set(each.tolist()) for each in versions] == [{0}, {1}]


def sampled(running):
    return len(running[1])


def test_a_turn_that_new_weights_interrupt_continues_at_its_token(driven, requests, tokenizer):
    source = "async def mine(episode):\n    await episode.sample()\n    return episode.rollout()"
    engine, session, found = driven(source)
    session.submit(requests(2, max_response_tokens=60))
    for version in (1, 2, 3):
        until(lambda version=version: min(map(sampled, engine.queue.values()), default=0) >= 10 * version)
        with session.turns.held():
            stopped = session.turns.interrupt()
            engine.version = version
        assert sorted(part.request_id for part in stopped) == ["1:0:0:1", "1:0:1:1"]
    until(lambda: len(found) == 2)
    for rollout in found:
        letters = tokenizer.decode(rollout.token_ids[rollout.loss_mask].tolist())
        assert letters == ("abcdefghijklmnopqrstuvwxyz" * 3)[:60]
        versions = rollout.policy_versions[rollout.loss_mask].tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2, 3}


def test_a_cancel_returns_what_has_ended_and_leaves_no_turn_and_no_episode(environment, tokenizer, requests):
    source = """
    async def mine(episode):
        while episode.goes_on:
            await episode.sample(max_tokens=2 if episode.prompt.columns["number"] else 90)
            if episode.prompt.columns["number"]:
                break
        return episode.rollout()
    """
    engine = Letters(tokenizer)
    session = environment(source).session(SamplerSession(LocalGroup(engine)))
    session.submit(requests(4, max_response_tokens=90))
    first = session.results()
    until(lambda: len(first) + len(session._ended) == 2 or session.turns.results(0.001))
    early = session.cancel(["1:0:0", "1:0:1", "1:1:0", "1:1:1"])
    assert {r.request_id for r in first + early} <= {"1:1:0", "1:1:1"}
    assert not engine.queue
    assert session.idle
    until(lambda: not session._tasks)
    session.submit(requests(1, max_response_tokens=90))  # the same id again
    until(lambda: session.turns.results(0.001) == [] and engine.queue)
    session.abandon()
    assert not engine.queue
    session.close()
    assert session.results() == []


def test_a_cancel_leaves_no_turn_of_an_episode_that_the_loop_has_already_cancelled(
    environment, tokenizer, requests, monkeypatch
):
    engine = Letters(tokenizer)
    source = "async def mine(episode):\n    await episode.sample()\n    return episode.rollout()"
    session = environment(source).session(SamplerSession(LocalGroup(engine)))
    session.submit(requests(2, max_response_tokens=90))
    until(lambda: session.turns.results(0.001) == [] and len(engine.queue) == 2)
    post = session.loop.post

    def and_wait(function, *args):
        post(function, *args)
        until(lambda: not session._futures)

    monkeypatch.setattr(session.loop, "post", and_wait)
    session.cancel(["1:0:0", "1:0:1"])
    assert not engine.queue
    session.close()


@pytest.mark.parametrize(("policy", "valid"), [("drop", False), ("zero", True)])
def test_a_turn_out_of_time_ends_its_episode_by_the_episodes_policy(driven, requests, caplog, policy, valid):
    source = """
    async def mine(episode):
        for _ in range(3):
            try:
                await episode.sample(max_tokens=4)
            except Exception:
                pass  # no environment can go past the limit
        return episode.rollout()
    """
    engine, session, found = driven(source, on_timeout=policy)
    engine.late.add("1:0:1:2")
    session.submit(requests(2))
    until(lambda: len(found) == 2)
    late = {r.request_id: (r.failure, r.valid, int(r.loss_mask.sum())) for r in found}
    assert late == {"1:0:0": ("", True, 12), "1:0:1": ("timeout", valid, 4)}
    assert "rollout.request_timeout_seconds" in caplog.text
    assert session.idle


def test_a_thousand_episodes_at_once_lose_and_double_no_turn(driven, requests):
    source = """
    async def mine(episode):
        for _ in range(3):
            await episode.sample(max_tokens=2)
            await asyncio.sleep(0.001 * (episode.seed % 7))
        return episode.rollout()
    """
    _, session, found = driven(source)
    session.submit(requests(1000))
    until(lambda: len(found) == 1000)
    assert len({r.request_id for r in found}) == 1000
    assert {int(r.loss_mask.sum()) for r in found} == {6}
    assert session.idle
    assert session.turns.idle


def test_a_failure_that_may_not_be_ends_the_run_from_the_thread_that_samples(
    environment, tokenizer, requests
):
    runner = environment("async def mine(episode): raise ValueError('no')", on_error="fail")
    session = runner.session(SamplerSession(LocalGroup(Letters(tokenizer))))
    session.submit(requests(2))
    with pytest.raises(Exception, match=r'environment.on_error = "fail"'):
        session.results()
    session.close()


def test_a_failure_of_the_last_episode_while_results_are_used_is_not_lost(environment, tokenizer, requests):
    """The consumer of the first result is slow, and the last episode fails meanwhile."""
    source = (
        "import asyncio\n"
        "async def mine(episode):\n"
        "    await episode.sample(max_tokens=1)\n"
        "    if episode.policy.request.index == 1:\n"
        "        await asyncio.sleep(0.2)\n"
        "        raise ValueError('late')\n"
        "    return episode.rollout()"
    )
    session = environment(source, on_error="fail").session(SamplerSession(LocalGroup(Letters(tokenizer))))
    session.submit([dataclasses.replace(r, index=i) for i, r in enumerate(requests(2))])
    assert len(session.results()) == 1
    time.sleep(0.5)
    assert not session.idle
    with pytest.raises(Exception, match="late"):
        session.results()
    session.close()


def test_episodes_of_evaluations_are_counted_apart(environment, tokenizer, requests):
    runner = environment("async def mine(episode):\n    await episode.sample()\n    return episode.rollout()")
    session = runner.session(SamplerSession(LocalGroup(Letters(tokenizer))))
    session.submit([dataclasses.replace(r, id="0:0:0") for r in requests(1)] + requests(2))
    found = []
    while not session.idle:
        found += session.results()
    assert len(found) == 3
    assert runner.metrics(held_out=True)["environment/turns"] == 1.0
    assert "environment/turns" not in runner.metrics(held_out=True)  # none since
    assert runner.metrics()["environment/turns"] == 1.0
    session.close()


def test_the_end_of_an_episode_ends_the_wait_for_turns_of_others(driven, requests):
    source = "async def mine(episode):\n    await episode.sample(max_tokens=1)\n    return episode.rollout()"
    _, session, found = driven(source)
    wake, woken = session.turns.wake, []
    session.turns.wake = lambda: (woken.append(session.idle), wake())
    session.submit(requests(1))
    until(lambda: woken and found)
