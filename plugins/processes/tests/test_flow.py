"""A flow of samplers: each is told what is new, what it finishes is told once, and nothing is left behind."""

from concurrent.futures import Future

import pytest

from engine_core.errors import WorkerLost
from engine_plugin_processes.flow import MOST_SECONDS
from engine_plugin_processes.placement import Slice
from engine_plugin_processes.worker_group import RemoteWorkerGroup


@pytest.fixture
def flowing(flowing_of, samplers_of):
    return flowing_of(samplers_of())


def test_each_sampler_is_told_its_own_requests_and_the_others_nothing(flowing):
    flowing.go(0, 1)
    assert flowing.asked() == [(1, ["r0"], []), (2, ["r1"], [])]
    flowing.go(2)
    assert flowing.asked(2) == [(3, ["r2"], [])]
    assert all(sent.message["kind"] == "flow" for sent in flowing.crew.sent)


def test_what_finishes_is_told_with_the_controllers_own_prompt_while_the_command_goes_on(flowing):
    flowing.go(0)
    flowing.finish(0, 0)
    assert [(r.request_id, r.prompt.token_ids) for r in flowing.told] == [("r0", [1, 2])]
    assert flowing.changes == 0
    flowing.answer(0)
    assert not flowing.flow.resting  # nothing is left


def test_a_sampler_that_was_told_something_else_rests_until_it_is_to_go_on(flowing):
    flowing.go(0, 1)
    flowing.answer(1)
    assert flowing.flow.resting
    assert flowing.changes == 1
    flowing.go()
    assert flowing.asked(2) == [(2, [], [])]
    assert not flowing.flow.resting


def test_a_sampler_that_is_told_more_does_not_rest_when_its_first_command_ends(flowing):
    flowing.go(*range(3))
    flowing.go(3)  # the first sampler, again
    flowing.answer(0)
    assert not flowing.flow.resting
    flowing.finish(3, 3)
    flowing.answer(3)
    assert flowing.flow.resting  # the first request is still there


def test_what_is_dropped_is_told_to_the_sampler_that_has_it(flowing):
    flowing.go(0, 1)
    flowing.go(dropped=["r1", "unknown"])
    assert flowing.asked(2) == [(2, [], ["r1"])]
    flowing.answer(1)
    flowing.answer(2)
    assert not flowing.flow.resting


@pytest.mark.parametrize("superseded", [False, True])
def test_a_failure_of_a_sampler_is_kept_for_whoever_looks(flowing, superseded):
    flowing.go(0)
    if superseded:
        flowing.go(dropped=["r0"])
    flowing.answer(0, WorkerLost("rollout", 0, "here", "it exited"))
    assert isinstance(flowing.flow.error, WorkerLost)
    assert flowing.changes == 1


def test_a_failure_of_whoever_is_told_does_not_reach_the_thread_that_reads(flowing, requests_of):
    flow = flowing.group.flow(lambda rollouts: 1 / 0, flowing.changed)
    flow.go(requests_of(0))
    flowing.finish(0, 0)
    assert isinstance(flow.error, ZeroDivisionError)


def test_the_end_leaves_commands_in_hand_and_hears_nothing_more(flowing):
    flowing.go(0, 1)
    flowing.answer(0)
    flowing.flow.close()
    assert flowing.crew.left == [2]
    before = flowing.changes
    flowing.answer(1, RuntimeError("interrupted"))
    assert (flowing.flow.error, flowing.changes) == (None, before)


def test_a_command_ends_by_itself_long_before_its_deadline(flowing, requests_of):
    flowing.go(0)
    assert flowing.crew.sent[0].message["seconds"] == MOST_SECONDS
    flowing.crew.stall_seconds = 8.0
    flowing.group.flow(flowing.told.extend, flowing.changed).go(requests_of(1))
    assert flowing.crew.sent[1].message["seconds"] == 2.0


@pytest.mark.parametrize(
    ("ranks", "independent"), [([(0,), (1,)], False), ([(0, 1), (2, 3)], True)], ids=["wait", "together"]
)
def test_samplers_that_wait_for_each_other_are_asked_in_rounds(ranks, independent):
    slices = [Slice(each, each[0]) for each in ranks]
    group = RemoteWorkerGroup(None, "rollout", slices, 0.0, independent)
    assert group.flow(lambda rollouts: None, lambda: None) is None


def test_an_answer_that_is_there_at_once_is_seen(flowing):
    def at_once(messages, what, **options):
        done = Future()
        done.set_result(None)
        return done

    flowing.crew.send = at_once
    flowing.go(0)
    assert flowing.flow.resting
