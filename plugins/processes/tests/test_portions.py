"""Requests in portions: the same ones whoever is faster, each once, and none after a stop."""

import random
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes.portions import Portions, portions_of
from engine_plugin_processes.worker_pool import Reply


def requests(lengths):
    return [
        Request(str(i), Prompt(str(i), [n] * n, ""), Sampling(max_response_tokens=2))
        for i, n in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 7))
def test_every_request_is_in_one_portion_and_the_longest_go_first(lengths, size):
    asked = requests(lengths)
    portions = portions_of(asked, size)
    assert sorted(r.id for portion in portions for r in portion) == sorted(r.id for r in asked)
    assert all(len(portion) == size for portion in portions[:-1])
    sizes = [len(r.prompt.token_ids) for portion in portions for r in portion]
    assert sizes == sorted(sizes, reverse=True)


class Slices:
    """Samplers that answer when they are told to."""

    def __init__(self):
        self.running, self.sent, self.given_up = {}, [], []

    def send(self, at, portion):
        assert at not in self.running, "a slice is given one portion at a time"
        future = self.running[at] = Reply(lambda: self.given_up.append(at))
        self.sent.append((at, [r.id for r in portion]))
        return future

    def answer(self, at):
        self.running.pop(at).set_result([self.sent[-1][0]])


@given(st.integers(1, 12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_who_is_free_first_gets_the_next_and_all_are_answered(count, slices, order):
    here = Slices()
    portions = portions_of(requests([3] * count), 1)
    reply = Portions(portions, slices, here.send, lambda answers: len(answers)).reply
    while here.running:
        assert not reply.done()
        assert len(here.running) <= slices
        here.answer(order.choice(list(here.running)))
    assert reply.result(0) == count
    assert [ids for _, ids in here.sent] == [[r.id for r in portion] for portion in portions]


def test_a_slow_slice_is_given_less():
    here = Slices()
    reply = Portions(portions_of(requests([3] * 6), 1), 2, here.send, len).reply
    while 1 in here.running and len(here.sent) < 6:
        here.answer(0)
    assert [at for at, _ in here.sent] == [0, 1, 0, 0, 0, 0]
    here.answer(0)
    here.answer(1)
    assert reply.result(0) == 6


def test_the_first_error_stops_the_others_and_is_the_error():
    here = Slices()
    reply = Portions(portions_of(requests([3] * 9), 1), 3, here.send, len).reply
    here.running.pop(1).set_exception(ValueError("broken"))
    assert here.given_up == [0, 2]
    assert not reply.done()  # they are still at it
    here.running.pop(0).set_exception(RuntimeError("Interrupted"))
    here.answer(2)
    with pytest.raises(ValueError, match="broken"):
        reply.result(0)
    assert len(here.sent) == 3


def test_nothing_is_sent_after_a_stop():
    here = Slices()
    reply = Portions(portions_of(requests([3] * 9), 1), 2, here.send, len).reply
    reply.give_up()
    assert here.given_up == [0, 1]
    for at in (0, 1):
        here.running.pop(at).set_exception(RuntimeError("Interrupted"))
    assert len(here.sent) == 2
    with pytest.raises(RuntimeError, match="Interrupted"):
        reply.result(0)


def test_a_crew_that_is_broken_answers_at_once_and_so_does_this():
    def send(at, portion):
        future = Future()
        future.set_exception(RuntimeError("lost"))
        return future

    with pytest.raises(RuntimeError, match="lost"):
        Portions(portions_of(requests([3] * 9), 1), 2, send, len).reply.result(0)


def test_the_order_of_equal_prompts_is_that_of_the_requests():
    asked = requests([2, 2, 2])
    for request in asked:
        request.prompt.token_ids[:] = [5, 5]
    shuffled = asked[:]
    random.Random(0).shuffle(shuffled)
    assert [r.id for r in portions_of(shuffled, 3)[0]] == [r.id for r in shuffled]


def test_answers_that_cannot_be_merged_are_an_error_and_not_waited_for():
    def merge(answers):
        raise KeyError("a rollout that nobody asked for")

    here = Slices()
    reply = Portions(portions_of(requests([3]), 1), 1, here.send, merge).reply
    here.answer(0)
    with pytest.raises(KeyError, match="nobody asked for"):
        reply.result(0)
