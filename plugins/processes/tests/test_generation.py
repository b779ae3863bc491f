"""One call over several slices: each request is answered once, in order, and none is sent after a stop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes.generation import Generation
from engine_plugin_processes.worker_pool import Reply


def requests(lengths):
    return [
        Request(str(i), Prompt(str(i), [n] * n, ""), Sampling(max_response_tokens=2))
        for i, n in enumerate(lengths)
    ]


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

    def generate_on(self, at, share, on_part):
        future = Reply(lambda: self.given_up.append(at))
        self.running[at] = future, share, on_part
        self.sent.append((at, [r.id for r in share]))
        return future

    def answer(self, at, parts=False):
        future, share, on_part = self.running.pop(at)
        rollouts = [copied(request) for request in share]
        if parts:
            on_part(rollouts)
        future.set_result([] if parts else rollouts)

    def fail(self, at, error):
        self.running.pop(at)[0].set_exception(error)


def copied(request):
    made = request.unsampled()
    made.prompt = Prompt(made.prompt.id, [], "")  # as it comes from a worker
    return made


@given(st.integers(0, 12), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_all_are_answered_in_order_whoever_is_first(count, slices, parts, order):
    here, asked = Slices(slices), requests([3] * count)
    reply = Generation(here, asked).reply
    assert sorted(id for _, ids in here.sent for id in ids) == sorted(request.id for request in asked)
    while here.running:
        assert not reply.done()
        here.answer(order.choice(list(here.running)), parts)
    found = reply.result(0)
    assert [rollout.request_id for rollout in found] == [request.id for request in asked]
    assert all(rollout.prompt is request.prompt for rollout, request in zip(found, asked, strict=True))


@pytest.mark.parametrize("independent", [True, False])
def test_slices_that_wait_for_each_other_are_called_without_a_request_too(independent):
    here = Slices(3)
    here.independent = independent
    Generation(here, requests([3]))
    assert sorted(at for at, _ in here.sent) == ([0] if independent else [0, 1, 2])


def test_parts_are_passed_on_and_not_in_the_result():
    here, parts = Slices(2), []
    reply = Generation(here, requests([3] * 4), parts.append).reply
    here.answer(1, parts=True)
    here.answer(0)
    assert reply.result(0) == []
    assert sorted(rollout.request_id for part in parts for rollout in part) == ["0", "1", "2", "3"]


def test_the_first_error_stops_the_others_and_is_the_error():
    here = Slices(3)
    reply = Generation(here, requests([3] * 9)).reply
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
    reply = Generation(here, requests([3] * 9)).reply
    reply.give_up()
    assert here.given_up == [0, 1]
    for at in (0, 1):
        here.fail(at, RuntimeError("Interrupted"))
    assert len(here.sent) == 2
    with pytest.raises(RuntimeError, match="Interrupted"):
        reply.result(0)


def test_a_crew_that_is_broken_answers_at_once_and_so_does_this():
    def generate_on(at, share, on_part):
        future = Reply(lambda: None)
        future.set_exception(RuntimeError("lost"))
        return future

    here = Slices(2)
    here.generate_on = generate_on
    with pytest.raises(RuntimeError, match="lost"):
        Generation(here, requests([3] * 9)).reply.result(0)


def test_an_answer_that_holds_no_rollouts_is_an_error_and_not_waited_for():
    here = Slices(1)
    reply = Generation(here, requests([3])).reply
    here.running.pop(0)[0].set_result(["no rollout"])
    with pytest.raises(AttributeError, match="request_id"):
        reply.result(0)
