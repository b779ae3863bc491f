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
    """A group whose samplers answer when they are told to."""

    independent, replacements = True, None

    def __init__(self, count):
        self.present, self.crew = list(range(count)), self
        self.running, self.sent, self.given_up = {}, [], []

    def reply(self, give_up):
        return Reply(give_up)

    def survives(self, error):
        return False

    def generate_on(self, at, portion, on_part):
        assert at not in self.running, "a slice is given one portion at a time"
        future = Reply(lambda: self.given_up.append(at))
        self.running[at] = future, portion
        self.sent.append((at, [r.id for r in portion]))
        return future

    def answer(self, at):
        future, portion = self.running.pop(at)
        future.set_result([request.unsampled() for request in portion])

    def fail(self, at, error):
        self.running.pop(at)[0].set_exception(error)


def begun(here, lengths, size=1):
    asked = requests(lengths)
    return Portions(here, portions_of(asked, size), asked).reply


@given(st.integers(1, 12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_who_is_free_first_gets_the_next_and_all_are_answered(count, slices, order):
    here = Slices(slices)
    reply = begun(here, [3] * count)
    while here.running:
        assert not reply.done()
        assert len(here.running) <= slices
        here.answer(order.choice(list(here.running)))
    assert [rollout.request_id for rollout in reply.result(0)] == [str(number) for number in range(count)]
    assert [ids for _, ids in here.sent] == [[str(number)] for number in range(count)]


def test_a_slow_slice_is_given_less():
    here = Slices(2)
    reply = begun(here, [3] * 6)
    while 1 in here.running and len(here.sent) < 6:
        here.answer(0)
    assert [at for at, _ in here.sent] == [0, 1, 0, 0, 0, 0]
    here.answer(0)
    here.answer(1)
    assert len(reply.result(0)) == 6


def test_the_first_error_stops_the_others_and_is_the_error():
    here = Slices(3)
    reply = begun(here, [3] * 9)
    here.fail(1, ValueError("broken"))
    assert here.given_up == [0, 2]
    assert not reply.done()  # they are still at it
    here.fail(0, RuntimeError("Interrupted"))
    here.answer(2)
    with pytest.raises(ValueError, match="broken"):
        reply.result(0)
    assert len(here.sent) == 3


def test_nothing_is_sent_after_a_stop():
    here = Slices(2)
    reply = begun(here, [3] * 9)
    reply.give_up()
    assert here.given_up == [0, 1]
    for at in (0, 1):
        here.fail(at, RuntimeError("Interrupted"))
    assert len(here.sent) == 2
    with pytest.raises(RuntimeError, match="Interrupted"):
        reply.result(0)


def test_a_crew_that_is_broken_answers_at_once_and_so_does_this():
    def generate_on(at, portion, on_part):
        future = Future()
        future.set_exception(RuntimeError("lost"))
        return future

    here = Slices(2)
    here.generate_on = generate_on
    with pytest.raises(RuntimeError, match="lost"):
        begun(here, [3] * 9).result(0)


def test_the_order_of_equal_prompts_is_that_of_the_requests():
    asked = requests([2, 2, 2])
    for request in asked:
        request.prompt.token_ids[:] = [5, 5]
    shuffled = asked[:]
    random.Random(0).shuffle(shuffled)
    assert [r.id for r in portions_of(shuffled, 3)[0]] == [r.id for r in shuffled]


def test_answers_that_cannot_be_merged_are_an_error_and_not_waited_for():
    here = Slices(1)
    asked = requests([3])
    reply = begun(here, [3])
    asked[0].id = "one that nobody asked for"
    here.running.pop(0)[0].set_result([asked[0].unsampled()])
    with pytest.raises(KeyError, match="nobody asked for"):
        reply.result(0)
