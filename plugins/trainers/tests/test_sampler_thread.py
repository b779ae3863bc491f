"""The thread that asks a sampler: everything is answered once, holds are exclusive, failures reach whoever waits."""

import dataclasses
import threading
import time
from concurrent.futures import Future

import pytest
import torch

from engine_core.contracts.engines import RolloutEngine
from engine_core.contracts.runtime import WorkerGroup
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_processes.worker_pool import Reply
from engine_plugin_trainers.sampler_thread import SamplerThread


class Slow(RolloutEngine):
    """One token a request and step; a response is over after as many tokens as its prompt's first says."""

    def __init__(self):
        super().__init__(None, None, None)
        self.queue, self.fail, self.steps = {}, None, 0

    def add(self, requests):
        for request in requests:
            start = len(request.prompt.token_ids)
            begun = request.begun
            tokens = [] if begun is None else begun.token_ids[start:].tolist()
            versions = [] if begun is None else begun.policy_versions[start:].tolist()
            self.queue[request.id] = (request, tokens, versions)

    @property
    def num_unfinished(self):
        return len(self.queue)

    def step(self):
        time.sleep(0.002)
        if self.fail:
            raise self.fail
        self.steps += 1
        done = []
        for id, (request, tokens, versions) in list(self.queue.items()):
            tokens.append(101 + len(tokens))
            versions.append(self.version)
            if len(tokens) >= request.prompt.token_ids[0]:
                done.append(self._rollout(id, "stop"))
        return done

    def abort(self, ids):
        return [self._rollout(id, "abort") for id in ids if id in self.queue]

    def update_weights(self, stream, version):
        raise NotImplementedError

    def _rollout(self, id, reason):
        request, tokens, versions = self.queue.pop(id)
        prompt = request.prompt.token_ids
        return Rollout(
            request_id=id,
            prompt=request.prompt,
            token_ids=torch.tensor(prompt + tokens),
            loss_mask=torch.tensor([False] * len(prompt) + [True] * len(tokens)),
            rollout_log_probs=torch.zeros(len(prompt) + len(tokens)),
            policy_versions=torch.tensor([0] * len(prompt) + versions, dtype=torch.int32),
            finish_reason=reason,
        )


class Group(WorkerGroup):
    def __init__(self, engine):
        self.engine, self.inside, self.most, self.calls = engine, 0, 0, 0

    def call(self, method, batch=None, split="dp", **plain):
        self.calls += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            future = Future()
            future.set_result(getattr(self.engine, method)(**plain))
            return future
        finally:
            self.inside -= 1


@pytest.fixture
def thread():
    made = SamplerThread(Group(Slow()))
    yield made
    made.close()
    assert not made._thread.is_alive()


def finish(thread):
    """Wait until every rollout was given."""
    while thread._asked:
        thread.check()
        time.sleep(0.001)


def requests(*lengths, first=0):
    return [
        Request(f"1:{n}:0", Prompt(f"t:{n}", [length], ""), Sampling(max_response_tokens=500))
        for n, length in enumerate(lengths, first)
    ]


def test_each_rollout_is_given_once_to_whoever_asked(thread):
    mine = []
    thread.ask((requests(30, 20), mine.append))
    others = [r for part in thread.stream(requests(3, 5, 4, first=7)) for r in part]
    others.sort(key=lambda rollout: rollout.request_id)
    assert [r.request_id for r in others] == ["1:7:0", "1:8:0", "1:9:0"]  # while the others go on
    assert mine == []
    finish(thread)
    assert sorted(r.request_id for r in mine) == ["1:0:0", "1:1:0"]
    assert [r.response_length for r in others] == [3, 5, 4]
    assert not thread._asked


def test_what_is_asked_at_once_goes_to_the_sampler_in_one_call(thread, monkeypatch):
    asked, found, call = [], [], thread.group.call

    def noted(method, **plain):
        asked.append([request.id for request in plain["requests"]])
        return call(method, **plain)

    monkeypatch.setattr(thread.group, "call", noted)
    thread.ask(*((requests(3, first=number), found.append) for number in range(200)))
    finish(thread)
    assert asked[0] == [f"1:{number}:0" for number in range(200)]
    assert len(found) == 200


def test_whoever_leaves_a_stream_has_the_rest_dropped(thread):
    parts = thread.stream(requests(2, 400))
    assert [r.request_id for r in next(parts)] == ["1:0:0"]
    parts.close()
    finish(thread)
    assert not thread._asked


def test_within_a_hold_the_group_is_the_holders_alone(thread):
    found = []
    thread.ask((requests(60, 60), found.append))
    for version in range(1, 6):
        with thread.held():
            before = [len(tokens) for _, tokens, _ in thread.group.engine.queue.values()]
            thread.group.engine.version = version
            time.sleep(0.01)
            assert [len(tokens) for _, tokens, _ in thread.group.engine.queue.values()] == before
        time.sleep(0.01)
    finish(thread)
    assert thread.group.most == 1
    versions = found[0].policy_versions[found[0].loss_mask].tolist()
    assert versions == sorted(versions)
    assert len(set(versions)) > 1  # it went on with the new weights


def test_what_is_cut_off_goes_on_where_it_was(thread):
    found = []
    engine = thread.group.engine
    thread.ask((requests(400, 400), found.append))  # of which each turn below takes a few
    for version in (1, 2, 3):
        before = engine.steps
        while engine.steps < before + 3:
            time.sleep(0.001)
        with thread.updating("abort"):
            engine.version = version
    finish(thread)
    assert sorted(r.request_id for r in found) == ["1:0:0", "1:1:0"]
    for rollout in found:
        assert rollout.token_ids.tolist() == [400, *range(101, 501)]  # each token once, in its place
        versions = rollout.policy_versions[rollout.loss_mask].tolist()
        assert versions == sorted(versions)
        assert rollout.prompt.token_ids == [400]
    assert thread.cut >= 4
    assert thread.kept_tokens > 0


def test_a_failure_of_the_sampler_reaches_whoever_waits(thread):
    thread.group.engine.fail = RuntimeError("the sampler broke")
    with pytest.raises(RuntimeError, match="the sampler broke"):
        next(thread.stream(requests(3)))
    with pytest.raises(RuntimeError, match="the sampler broke"), thread.held():
        pass
    with pytest.raises(RuntimeError, match="the sampler broke"):
        thread.check()


def test_a_thread_with_nothing_to_do_asks_nobody(thread):
    list(thread.stream(requests(3)))
    calls, busy = thread.group.calls, thread.busy_seconds
    time.sleep(0.05)
    assert thread.group.calls == calls
    assert thread.busy_seconds == busy > 0


def test_it_ends_with_requests_left():
    made = SamplerThread(Group(Slow()))
    made.ask((requests(10**6), lambda found: None))
    time.sleep(0.01)
    made.close()
    assert "sampling" not in {thread.name for thread in threading.enumerate()}


def test_a_response_that_ran_out_of_time_is_not_asked_for_again(thread):
    engine, found = thread.group.engine, []
    stop = engine.abort
    engine.abort = lambda ids: [dataclasses.replace(part, failure="timeout") for part in stop(ids)]
    thread.ask((requests(400), found.append))
    time.sleep(0.02)
    with thread.updating("abort"):
        pass
    finish(thread)
    assert [(r.request_id, r.finish_reason, r.failure) for r in found] == [("1:0:0", "abort", "timeout")]
    assert thread.cut == 0


def test_a_call_that_is_made_while_the_thread_is_closed_is_given_up():
    begun, go_on = threading.Event(), threading.Event()

    class Late(WorkerGroup):
        world_size = 1

        def call(self, method, batch=None, split="dp", **plain):
            begun.set()
            assert go_on.wait(60)
            reply = Reply(lambda: reply.set_exception(RuntimeError("given up")))
            return reply

    thread = SamplerThread(Late())
    thread.ask((requests(1), lambda rollout: None))
    assert begun.wait(60)
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    with thread._changed:
        assert thread._changed.wait_for(lambda: thread._closing, 60)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
