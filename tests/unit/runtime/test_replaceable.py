"""Requests of a sampler that is lost: asked of the others once, and answered once."""

import pytest
import torch

from engine_core.errors import DataError, WorkerLost
from engine_core.runtime.codec import decode
from engine_core.runtime.crew import Reply
from engine_core.runtime.crew_group import CrewGroup
from engine_core.runtime.placement import Slice
from engine_core.runtime.replaceable import ReplaceableGroup
from engine_core.runtime.replacing import Replacements
from engine_core.types import Prompt, Request, Rollout, Sampling


def requests(count):
    return [
        Request(f"r{i}", Prompt(f"p{i}", [5, 6], ""), Sampling(max_response_tokens=4), i, 0)
        for i in range(count)
    ]


def rollout(request):
    made = request.unsampled()
    made.finish_reason = "stop"
    return made


class Crew:
    """Commands as they were sent, answered when a test says so."""

    def __init__(self):
        self.sent, self.number = [], 0

    def next_number(self):
        self.number += 1
        return self.number

    def send(self, messages, what, number, on_part=None, **settings):
        reply = Reply(lambda: None)
        ((rank, encoded),) = messages.items()
        plain = decode(encoded.header, bytearray(b"".join(encoded.buffers)))["plain"]
        self.sent.append((rank, plain, reply, on_part))
        return reply

    def take(self):
        sent, self.sent = self.sent, []
        return sent


class Away(Replacements):
    """``Replacements`` that begin no process."""

    def _replace(self, worker, number):
        return


class Handle:
    def __init__(self, rank):
        self.rank = rank


@pytest.fixture
def crew():
    return Crew()


@pytest.fixture
def replacements(crew):
    return Away(crew, [1, 2, 3], 2, "runtime.x.max_replacements", None, 1.0)


@pytest.fixture
def group(crew, replacements):
    slices = [Slice((rank,), rank) for rank in (1, 2, 3)]
    return ReplaceableGroup(CrewGroup(crew, "rollout", slices, 0.0, True, 2), replacements)


def lose(replacements, rank, reply=None):
    loss = WorkerLost("rollout", rank, "here", "gone")
    assert replacements.lost(Handle(rank), loss)
    if reply is not None:
        reply.set_exception(loss)


def ids(rollouts):
    return [each.request_id for each in rollouts]


def test_a_lost_samplers_portion_goes_to_the_others_and_every_request_is_answered_once(
    crew, replacements, group
):
    asked = requests(10)
    reply = group.call("generate", requests=asked)
    first = crew.take()
    assert [rank for rank, *_ in first] == [1, 2, 3]
    lose(replacements, 2, first[1][2])
    answered = []
    waiting = [first[0], first[2]]
    while waiting:
        rank, plain, future, _ = waiting.pop(0)
        assert rank != 2
        answered += [request.id for request in plain["requests"]]
        future.set_result([rollout(request) for request in plain["requests"]])
        waiting += crew.take()
    assert ids(reply.result(1)) == [request.id for request in asked]
    assert sorted(answered) == sorted(request.id for request in asked)
    assert replacements.metrics() == {"sampling/lost": 1.0, "sampling/joined": 0.0, "sampling/reissued": 2.0}


def test_what_was_told_in_parts_is_not_asked_again(crew, replacements, group):
    asked, parts = requests(3), []
    reply = group._generate(asked, parts.append)
    sent = {rank: (plain["requests"], future, tell) for rank, plain, future, tell in crew.take()}
    (mine, future, tell) = sent[1]
    tell([rollout(mine[0])])
    for rank in (2, 3):
        sent[rank][2]([rollout(request) for request in sent[rank][0]])
        sent[rank][1].set_result([])
    lose(replacements, 1, future)
    assert crew.take() == []
    assert reply.result(1) == []
    assert sorted(each.request_id for part in parts for each in part) == ["r0", "r1", "r2"]


def test_another_error_than_a_loss_ends_it(crew, replacements, group):
    reply = group.call("generate", requests=requests(3))
    sent = crew.take()
    sent[0][2].set_exception(DataError("too long"))
    for _, _, future, _ in sent[1:]:
        future.set_result([])
    with pytest.raises(DataError, match="too long"):
        reply.result(1)


def test_requests_that_come_and_go_are_asked_of_the_others_in_the_next_call(crew, replacements, group):
    reply = group.call("advance", requests=requests(6))
    sent = {rank: (plain["requests"], future) for rank, plain, future, _ in crew.take()}
    assert {rank: len(mine) for rank, (mine, _) in sent.items()} == {1: 2, 2: 2, 3: 2}
    lost = ids_of(sent[2][0])
    lose(replacements, 2, sent[2][1])
    for rank in (1, 3):
        sent[rank][1].set_result([rollout(sent[rank][0][0])])
    assert sorted(ids(reply.result(1))) == sorted([sent[1][0][0].id, sent[3][0][0].id])
    group.call("advance", requests=[])
    again = {rank: ids_of(plain["requests"]) for rank, plain, *_ in crew.take()}
    assert again.keys() == {1, 3}
    assert sorted(id for given in again.values() for id in given) == sorted(lost)
    group.call("advance", requests=[])
    assert all(plain["requests"] == [] for _, plain, *_ in crew.take())  # once


def test_a_lost_request_that_is_to_be_stopped_is_one_that_nothing_was_sampled_of(crew, replacements, group):
    asked = requests(3)
    group.call("advance", requests=asked)
    sent = crew.take()
    lost = sent[1][1]["requests"][0].id
    for _, _, future, _ in sent:
        future.set_result([])
    lose(replacements, 2)
    reply = group.call("advance", requests=[], stopped=[lost])
    for _, plain, future, _ in crew.take():
        assert plain["requests"] == []
        future.set_result([])
    (stopped,) = reply.result(1)
    assert (stopped.request_id, stopped.finish_reason, int(stopped.loss_mask.sum())) == (lost, "abort", 0)
    assert isinstance(stopped, Rollout)
    assert not torch.any(stopped.loss_mask)


def test_a_dropped_one_is_not_asked_again(crew, replacements, group):
    group.call("advance", requests=requests(3))
    sent = crew.take()
    for _, _, future, _ in sent:
        future.set_result([])
    lose(replacements, 1)
    group.call("advance", requests=[], dropped=ids_of(sent[0][1]["requests"]))
    assert all(plain["requests"] == [] for _, plain, *_ in crew.take())


def ids_of(asked):
    return [request.id for request in asked]
