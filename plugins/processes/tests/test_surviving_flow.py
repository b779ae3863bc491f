"""A flow of samplers that come and go: nothing is lost with one, and nothing is told twice."""

import pytest

from engine_core.errors import DataError


@pytest.fixture
def flowing(flowing_of, replaceable_of):
    made = flowing_of(replaceable_of())
    made.go(*range(6))
    assert made.asked() == [(1, ["r0", "r3"], []), (2, ["r1", "r4"], []), (3, ["r2", "r5"], [])]
    return made


def test_what_a_lost_sampler_had_not_told_is_asked_of_the_others_once(flowing):
    flowing.finish(1, 1)
    flowing.lose(2, 1)
    assert (flowing.changes, flowing.flow.resting, flowing.flow.error) == (1, True, None)
    flowing.go()
    assert flowing.asked(3) == [(1, ["r4"], [])]
    assert not flowing.flow.resting
    flowing.finish(3, 0, 3, 4)
    flowing.finish(2, 2, 5)
    assert sorted(flowing.ids()) == [f"r{number}" for number in range(6)]
    assert [rollout.prompt.token_ids for rollout in flowing.told] == [[1, 2]] * 6  # put back here
    assert flowing.group.replacements.metrics()["sampling/reissued"] == 1


def test_the_next_requests_go_to_those_that_are_there(flowing):
    flowing.lose(2, 1)
    flowing.go(6, 7)
    asked = flowing.asked(3)
    assert [rank for rank, *_ in asked] == [1, 3]
    assert sorted(id for _, ids, _ in asked for id in ids) == ["r1", "r4", "r6", "r7"]


def test_one_that_is_lost_between_two_commands_is_seen(flowing):
    """It was told something else (new weights): nothing of its flow is open that could tell the loss."""
    flowing.answer(1)
    assert flowing.flow.resting
    flowing.lose(2)
    flowing.go()
    assert sorted(id for _, ids, _ in flowing.asked(3) for id in ids) == ["r1", "r4"]
    assert {rank for rank, *_ in flowing.asked(3)} == {1, 3}


def test_one_that_came_back_before_the_loss_was_looked_at_is_asked_anew(flowing):
    """The process in its place knows nothing of what the lost one had."""
    flowing.lose(2, 1)
    flowing.group.replacements._ready.append(2)
    assert flowing.group.replacements.join()
    flowing.go()
    assert flowing.asked(3) == [(2, ["r1", "r4"], [])]


def test_one_that_is_lost_twice_is_made_up_for_twice(flowing):
    flowing.lose(2, 1)
    flowing.group.replacements._ready.append(2)
    flowing.group.replacements.join()
    flowing.go()
    flowing.lose(2, 3)
    flowing.go()
    assert sorted(id for _, ids, _ in flowing.asked(4) for id in ids) == ["r1", "r4"]
    assert 2 not in {rank for rank, *_ in flowing.asked(4)}


def test_what_nobody_waits_for_is_not_asked_again_and_the_lost_one_is_told_nothing(flowing):
    flowing.lose(2, 1)
    flowing.go(dropped=["r1", "r0"])
    assert flowing.asked(3) == [(1, ["r4"], ["r0"])]


def test_another_error_than_a_loss_ends_it(flowing):
    flowing.answer(0, DataError("a row"))
    assert isinstance(flowing.flow.error, DataError)


def test_a_loss_that_the_run_does_not_outlive_ends_it(flowing):
    flowing.lose(1, 0)
    flowing.lose(2, 1)
    last = flowing.lose(3, 2, outlived=False)
    assert flowing.flow.error is last


def test_a_round_takes_back_what_a_lost_sampler_of_a_flow_had(flowing):
    """New weights cut responses off (``advance``) before the flow has looked at the loss."""
    flowing.lose(2, 1)
    flowing.group.call("advance", requests=[], stopped=["r1"])
    assert [[each.id for each in sent.requests] for sent in flowing.crew.sent[3:]] == [["r4"], []]
    assert not flowing.group.lost_some
