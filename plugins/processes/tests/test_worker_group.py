"""Groups of processes, as the controller sees them."""

from concurrent.futures import Future

import pytest

from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes.placement import Slice
from engine_plugin_processes.worker_group import RemoteWorkerGroup


def test_a_group_has_as_many_processes_as_its_slices_have_ranks():
    slices = [Slice((0, 1), 0), Slice((2, 3), 2)]
    assert RemoteWorkerGroup(None, "actor", slices, attention=0.0, independent=False).world_size == 4


class Crew:
    """Notes what is sent, and answers what it is told to."""

    def __init__(self):
        self.sent, self.answers = [], {}

    def send(self, messages, what, *, leaders, merge, interruptible):
        self.sent.append((messages, leaders))
        done = Future()
        done.set_result(merge([self.answers.get(rank, []) for rank in leaders]))
        return done


def request(number):
    return Request(
        f"1:{number}:0", Prompt(f"train:{number}", [1, 2], ""), Sampling(max_response_tokens=8, seed=1)
    )


@pytest.fixture
def group():
    return RemoteWorkerGroup(
        Crew(), "rollout", [Slice((2 * i, 2 * i + 1), 2 * i) for i in range(3)], 0.0, True
    )


def told(group):
    messages, leaders = group.crew.sent[-1]
    return sorted(messages), leaders


def test_only_samplers_with_something_to_sample_are_asked_to_go_on(group):
    group.call("advance", requests=[request(0), request(1)]).result()
    assert told(group) == ([0, 1, 2, 3], [0, 2])  # the third sampler has nothing
    group.crew.answers[2] = [request(1).unsampled()]
    assert [r.request_id for r in group.call("advance", requests=[]).result()] == ["1:1:0"]
    group.call("advance", requests=[]).result()
    assert told(group) == ([0, 1], [0])
    group.call("advance", requests=[], dropped=["1:0:0"]).result()
    assert told(group) == ([0, 1, 2, 3, 4, 5], [0, 2, 4])
    assert group.call("advance", requests=[]).result() == []  # somebody answers although nobody has anything
    assert told(group) == ([0, 1], [0])
    assert group.running.under_way == [0, 0, 0]


def test_samplers_that_are_told_the_same_share_one_message(group):
    group.call("advance", requests=[request(i) for i in range(3)]).result()
    group.call("advance", requests=[request(3)], stopped=["1:0:0"]).result()
    messages, _ = group.crew.sent[-1]
    first, second, third = (messages[rank] for rank in (0, 2, 4))
    assert second is third
    assert first["plain"]["requests"][0].id == "1:3:0"
    assert second["plain"] == {"requests": [], "stopped": ["1:0:0"]}
