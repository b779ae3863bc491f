"""A flow of samplers: each is told what is new, what it finishes is told once, and nothing is left behind."""

from concurrent.futures import Future

import pytest

from engine_core.errors import WorkerLost
from engine_core.runtime.codec import decode
from engine_core.runtime.crew import Reply
from engine_core.runtime.crew_group import CrewGroup
from engine_core.runtime.flow import MOST_SECONDS
from engine_core.runtime.placement import Slice
from engine_core.types import Prompt, Request, Sampling


class Crew:
    """Notes what is sent; its workers say what a test has them say."""

    stall_seconds = 600.0

    def __init__(self):
        self.sent, self.left = [], []

    def next_number(self):
        return len(self.sent) + 1

    def send(self, messages, what, number, *, interruptible, on_part=None, leaders=None, merge=None):
        ((rank, message),) = messages.items()
        reply = Reply(lambda: self.left.append(rank))
        self.sent.append((rank, decode(message.header, bytearray(b"".join(message.buffers))), reply, on_part))
        return reply


def request(number):
    return Request(f"1:{number}:0", Prompt(f"train:{number}", [1, 2], "a"), Sampling(max_response_tokens=8))


class Flowing:
    """A group of three samplers and what their flow tells."""

    def __init__(self):
        self.crew = Crew()
        slices = [Slice((rank,), rank) for rank in range(3)]
        self.group = CrewGroup(self.crew, "rollout", slices, 0.0, True)
        self.told, self.changes = [], 0
        self.flow = self.group.flow(self.told.extend, self._changed)

    def _changed(self):
        self.changes += 1

    def asked(self, since=0):
        """Rank and ids of each command since then."""
        return [
            (rank, [r.id for r in m["requests"]], m["dropped"]) for rank, m, _, _ in self.crew.sent[since:]
        ]

    def finish(self, at, *numbers):
        """Command ``at`` tells these responses."""
        parts = [request(number).unsampled() for number in numbers]
        for part in parts:
            part.prompt = Prompt(part.prompt.id, [], "")  # as it comes from a worker
        self.crew.sent[at][3](parts)

    def answer(self, at, error=None):
        """Command ``at`` is over."""
        reply = self.crew.sent[at][2]
        reply.set_exception(error) if error else reply.set_result(None)


@pytest.fixture
def flowing():
    return Flowing()


def test_each_sampler_is_told_its_own_requests_and_the_others_nothing(flowing):
    flowing.flow.go([request(0), request(1)])
    assert flowing.asked() == [(0, ["1:0:0"], []), (1, ["1:1:0"], [])]
    flowing.flow.go([request(2)])
    assert flowing.asked(2) == [(2, ["1:2:0"], [])]
    assert all(message["kind"] == "flow" for _, message, _, _ in flowing.crew.sent)


def test_what_finishes_is_told_with_the_controllers_own_prompt_while_the_command_goes_on(flowing):
    flowing.flow.go([request(0)])
    flowing.finish(0, 0)
    assert [(r.request_id, r.prompt.token_ids) for r in flowing.told] == [("1:0:0", [1, 2])]
    assert flowing.changes == 0
    flowing.answer(0)
    assert not flowing.flow.resting  # nothing is left


def test_a_sampler_that_was_told_something_else_rests_until_it_is_to_go_on(flowing):
    flowing.flow.go([request(0), request(1)])
    flowing.answer(1)
    assert flowing.flow.resting
    assert flowing.changes == 1
    flowing.flow.go()
    assert flowing.asked(2) == [(1, [], [])]
    assert not flowing.flow.resting


def test_a_sampler_that_is_told_more_does_not_rest_when_its_first_command_ends(flowing):
    flowing.flow.go([request(n) for n in range(3)])
    flowing.flow.go([request(3)])  # the first sampler, again
    flowing.answer(0)
    assert not flowing.flow.resting
    flowing.finish(3, 3)
    flowing.answer(3)
    assert flowing.flow.resting  # the first request is still there


def test_what_is_dropped_is_told_to_the_sampler_that_has_it(flowing):
    flowing.flow.go([request(0), request(1)])
    flowing.flow.go([], ["1:1:0", "unknown"])
    assert flowing.asked(2) == [(1, [], ["1:1:0"])]
    flowing.answer(1)
    flowing.answer(2)
    assert not flowing.flow.resting


@pytest.mark.parametrize("superseded", [False, True])
def test_a_failure_of_a_sampler_is_kept_for_whoever_looks(flowing, superseded):
    flowing.flow.go([request(0)])
    if superseded:
        flowing.flow.go([], ["1:0:0"])
    flowing.answer(0, WorkerLost("rollout", 0, "here", "it exited"))
    assert isinstance(flowing.flow.error, WorkerLost)
    assert flowing.changes == 1


def test_a_failure_of_whoever_is_told_does_not_reach_the_thread_that_reads(flowing):
    flow = flowing.group.flow(lambda rollouts: 1 / 0, flowing._changed)
    flow.go([request(0)])
    flowing.finish(0, 0)
    assert isinstance(flow.error, ZeroDivisionError)


def test_the_end_leaves_commands_in_hand_and_hears_nothing_more(flowing):
    flowing.flow.go([request(0), request(1)])
    flowing.answer(0)
    flowing.flow.close()
    assert flowing.crew.left == [1]
    before = flowing.changes
    flowing.answer(1, RuntimeError("interrupted"))
    assert (flowing.flow.error, flowing.changes) == (None, before)


def test_a_command_ends_by_itself_long_before_its_deadline(flowing):
    flowing.flow.go([request(0)])
    assert flowing.crew.sent[0][1]["seconds"] == MOST_SECONDS
    flowing.crew.stall_seconds = 8.0
    flowing.group.flow(flowing.told.extend, flowing._changed).go([request(1)])
    assert flowing.crew.sent[1][1]["seconds"] == 2.0


@pytest.mark.parametrize(
    ("ranks", "independent"), [([(0,), (1,)], False), ([(0, 1), (2, 3)], True)], ids=["wait", "together"]
)
def test_samplers_that_wait_for_each_other_are_asked_in_rounds(ranks, independent):
    slices = [Slice(each, each[0]) for each in ranks]
    group = CrewGroup(Crew(), "rollout", slices, 0.0, independent)
    assert group.flow(lambda rollouts: None, lambda: None) is None


def test_an_answer_that_is_there_at_once_is_seen(flowing):
    def at_once(messages, what, number, **options):
        flowing.crew.sent.append((next(iter(messages)), {}, None, None))
        done = Future()
        done.set_result(None)
        return done

    flowing.crew.send = at_once
    flowing.flow.go([request(0)])
    assert flowing.flow.resting
