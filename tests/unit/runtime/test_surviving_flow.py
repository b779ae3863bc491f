"""A flow of samplers that come and go: nothing is lost with one, and nothing is told twice."""

import pytest

from engine_core.errors import DataError, WorkerLost
from engine_core.runtime.codec import decode
from engine_core.runtime.crew import Reply
from engine_core.runtime.crew_group import CrewGroup
from engine_core.runtime.placement import Slice
from engine_core.runtime.replaceable import ReplaceableGroup
from engine_core.runtime.replacing import Replacements
from engine_core.types import Prompt, Request, Sampling


class Crew:
    """Notes what is sent; its workers say what a test has them say."""

    stall_seconds = 600.0

    def __init__(self):
        self.sent = []

    def next_number(self):
        return len(self.sent) + 1

    def send(self, messages, what, number, *, on_part=None, **settings):
        ((rank, message),) = messages.items()
        self.sent.append(
            (rank, decode(message.header, bytearray(b"".join(message.buffers))), Reply(lambda: None), on_part)
        )
        return self.sent[-1][2]


class Away(Replacements):
    """``Replacements`` that begin no process."""

    def _replace(self, worker, number):
        return


class Handle:
    def __init__(self, rank):
        self.rank = rank


def request(number):
    return Request(f"r{number}", Prompt(f"p{number}", [1, 2], "a"), Sampling(max_response_tokens=8))


class Flowing:
    """A group of the ranks 1, 2 and 3 and what their flow tells."""

    def __init__(self):
        self.crew, self.told, self.changes = Crew(), [], 0
        self.replacements = Away(self.crew, [1, 2, 3], 2, "runtime.x.max_replacements", None, 1.0)
        slices = [Slice((rank,), rank) for rank in (1, 2, 3)]
        self.group = ReplaceableGroup(CrewGroup(self.crew, "rollout", slices, 0.0, True), self.replacements)
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
        self.crew.sent[at][3]([request(number).unsampled() for number in numbers])

    def lose(self, rank, *commands):
        """The worker is gone, and with it what it had in hand."""
        loss = WorkerLost("rollout", rank, "here", "gone")
        assert self.replacements.lost(Handle(rank), loss)
        for at in commands:
            self.crew.sent[at][2].set_exception(loss)

    def ids(self):
        return [rollout.request_id for rollout in self.told]


@pytest.fixture
def flowing():
    made = Flowing()
    made.flow.go([request(number) for number in range(6)])
    assert made.asked() == [(1, ["r0", "r3"], []), (2, ["r1", "r4"], []), (3, ["r2", "r5"], [])]
    return made


def test_what_a_lost_sampler_had_not_told_is_asked_of_the_others_once(flowing):
    flowing.finish(1, 1)
    flowing.lose(2, 1)
    assert (flowing.changes, flowing.flow.resting, flowing.flow.error) == (1, True, None)
    flowing.flow.go()
    assert flowing.asked(3) == [(1, ["r4"], [])]
    assert not flowing.flow.resting
    flowing.finish(3, 0, 3, 4)
    flowing.finish(2, 2, 5)
    assert sorted(flowing.ids()) == [f"r{number}" for number in range(6)]
    assert flowing.replacements.metrics()["sampling/reissued"] == 1


def test_the_next_requests_go_to_those_that_are_there(flowing):
    flowing.lose(2, 1)
    flowing.flow.go([request(6), request(7)])
    asked = flowing.asked(3)
    assert [rank for rank, *_ in asked] == [1, 3]
    assert sorted(id for _, ids, _ in asked for id in ids) == ["r1", "r4", "r6", "r7"]


def test_one_that_is_lost_between_two_commands_is_seen(flowing):
    """It was told something else (new weights): nothing of its flow is open that could tell the loss."""
    flowing.crew.sent[1][2].set_result(None)
    assert flowing.flow.resting
    flowing.lose(2)
    flowing.flow.go()
    assert sorted(id for _, ids, _ in flowing.asked(3) for id in ids) == ["r1", "r4"]
    assert {rank for rank, *_ in flowing.asked(3)} == {1, 3}


def test_one_that_came_back_before_the_loss_was_looked_at_is_asked_anew(flowing):
    """The process in its place knows nothing of what the lost one had."""
    flowing.lose(2, 1)
    flowing.replacements._ready.append(2)
    assert flowing.replacements.join()
    flowing.flow.go()
    assert flowing.asked(3) == [(2, ["r1", "r4"], [])]


def test_one_that_is_lost_twice_is_made_up_for_twice(flowing):
    flowing.lose(2, 1)
    flowing.replacements._ready.append(2)
    flowing.replacements.join()
    flowing.flow.go()
    flowing.lose(2, 3)
    flowing.flow.go()
    assert sorted(id for _, ids, _ in flowing.asked(4) for id in ids) == ["r1", "r4"]
    assert 2 not in {rank for rank, *_ in flowing.asked(4)}


def test_what_nobody_waits_for_is_not_asked_again_and_the_lost_one_is_told_nothing(flowing):
    flowing.lose(2, 1)
    flowing.flow.go(dropped=["r1", "r0"])
    assert flowing.asked(3) == [(1, ["r4"], ["r0"])]


def test_another_error_than_a_loss_ends_it(flowing):
    flowing.crew.sent[0][2].set_exception(DataError("a row"))
    assert isinstance(flowing.flow.error, DataError)


def test_a_loss_that_the_run_does_not_outlive_ends_it(flowing):
    flowing.lose(1, 0)
    flowing.lose(2, 1)
    last = WorkerLost("rollout", 3, "here", "gone")
    assert not flowing.replacements.lost(Handle(3), last)
    flowing.crew.sent[2][2].set_exception(last)
    assert flowing.flow.error is last


def test_a_round_takes_back_what_a_lost_sampler_of_a_flow_had(flowing):
    """New weights cut responses off (``advance``) before the flow has looked at the loss."""
    flowing.lose(2, 1)
    flowing.group.call("advance", requests=[], stopped=["r1"])
    plain = [message["plain"]["requests"] for _, message, _, _ in flowing.crew.sent[3:]]
    assert [[each.id for each in share] for share in plain] == [["r4"], []]
    assert not flowing.group.lost_some
