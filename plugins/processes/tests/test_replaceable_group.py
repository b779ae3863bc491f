"""Requests of a sampler that is lost: asked of the others once, and answered once."""

import pytest
import torch

from engine_core.errors import DataError
from engine_core.types import Rollout


@pytest.fixture
def group(replaceable_of):
    return replaceable_of()


@pytest.fixture
def crew(group):
    return group.crew


@pytest.fixture
def replacements(group):
    return group.replacements


def rollout(request):
    made = request.unsampled()
    made.finish_reason = "stop"
    return made


def ids(rollouts):
    return [each.request_id for each in rollouts]


def ids_of(asked):
    return [request.id for request in asked]


def test_a_lost_samplers_share_goes_to_the_others_and_every_request_is_answered_once(
    crew, replacements, group, requests_of
):
    asked = requests_of(*range(10))
    reply = group.call("generate", requests=asked)
    first = crew.take()
    assert [sent.rank for sent in first] == [1, 2, 3]
    replacements.lose(2, first[1].reply)
    answered = []
    waiting = [first[0], first[2]]
    while waiting:
        sent = waiting.pop(0)
        assert sent.rank != 2
        answered += ids_of(sent.requests)
        sent.reply.set_result([rollout(request) for request in sent.requests])
        waiting += crew.take()
    assert ids(reply.result(1)) == [request.id for request in asked]
    assert sorted(answered) == sorted(request.id for request in asked)
    assert replacements.metrics() == {
        "sampling/lost": 1.0, "sampling/joined": 0.0, "sampling/reissued": 3.0, "sampling/samplers": 2.0
    }  # fmt: skip


def test_what_was_told_in_parts_is_not_asked_again(crew, replacements, group, requests_of):
    asked, parts = requests_of(*range(3)), []
    reply = group._generate(asked, parts.append)
    first, *others = crew.take()
    first.tell([rollout(first.requests[0])])
    for sent in others:
        sent.tell([rollout(request) for request in sent.requests])
        sent.reply.set_result([])
    replacements.lose(1, first.reply)
    assert crew.take() == []
    assert reply.result(1) == []
    assert sorted(each.request_id for part in parts for each in part) == ["r0", "r1", "r2"]


def test_what_nobody_waits_for_any_more_is_not_asked_again(crew, replacements, group, requests_of):
    reply = group.call("generate", requests=requests_of(*range(3)))
    first, *others = crew.take()
    others[0].reply.set_result([])
    reply.give_up()
    replacements.lose(1, first.reply)
    assert crew.take() == []
    assert replacements.metrics()["sampling/reissued"] == 0


def test_another_error_than_a_loss_ends_it(crew, replacements, group, requests_of):
    reply = group.call("generate", requests=requests_of(*range(3)))
    first, *others = crew.take()
    first.reply.set_exception(DataError("too long"))
    for sent in others:
        sent.reply.set_result([])
    with pytest.raises(DataError, match="too long"):
        reply.result(1)


def test_requests_that_come_and_go_are_asked_of_the_others_in_the_next_call(
    crew, replacements, group, requests_of
):
    reply = group.call("advance", requests=requests_of(*range(6)))
    sent = {each.rank: each for each in crew.take()}
    assert {rank: len(each.requests) for rank, each in sent.items()} == {1: 2, 2: 2, 3: 2}
    lost = ids_of(sent[2].requests)
    replacements.lose(2, sent[2].reply)
    for rank in (1, 3):
        sent[rank].reply.set_result([rollout(sent[rank].requests[0])])
    assert sorted(ids(reply.result(1))) == sorted([sent[1].requests[0].id, sent[3].requests[0].id])
    group.call("advance", requests=[])
    again = {each.rank: ids_of(each.requests) for each in crew.take()}
    assert again.keys() == {1, 3}
    assert sorted(id for given in again.values() for id in given) == sorted(lost)
    group.call("advance", requests=[])
    assert all(each.requests == [] for each in crew.take())  # once


def test_a_lost_request_that_is_to_be_stopped_is_one_that_nothing_was_sampled_of(
    crew, replacements, group, requests_of
):
    asked = requests_of(*range(3))
    group.call("advance", requests=asked)
    sent = crew.take()
    lost = sent[1].requests[0].id
    for each in sent:
        each.reply.set_result([])
    replacements.lose(2)
    reply = group.call("advance", requests=[], stopped=[lost])
    for each in crew.take():
        assert each.requests == []
        each.reply.set_result([])
    (stopped,) = reply.result(1)
    assert (stopped.request_id, stopped.finish_reason, int(stopped.loss_mask.sum())) == (lost, "abort", 0)
    assert isinstance(stopped, Rollout)
    assert not torch.any(stopped.loss_mask)


def test_a_dropped_one_is_not_asked_again(crew, replacements, group, requests_of):
    group.call("advance", requests=requests_of(*range(3)))
    sent = crew.take()
    for each in sent:
        each.reply.set_result([])
    replacements.lose(1)
    group.call("advance", requests=[], dropped=ids_of(sent[0].requests))
    assert all(each.requests == [] for each in crew.take())
