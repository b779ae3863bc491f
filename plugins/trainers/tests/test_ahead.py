"""The rule of running ahead, held against its proof: no group is taken too late, and no step waits in vain."""

import random

import pytest

from engine_core.types import Prompt
from engine_plugin_trainers.ahead import AheadQueue, Group


def group(number):
    return Group(number, Prompt(f"train:{number}", [1], ""))


def simulate(per_step, staleness, steps, in_order, seed):
    """A run whose groups become ready at random moments; the steps that admitted and took each group."""
    moments = random.Random(seed)
    queue, admitted, taken = AheadQueue(per_step, staleness, in_order), {}, {}
    for step in range(1, steps + 1):
        rounds = [per_step] if moments.random() < 0.7 else [per_step, moments.randint(1, per_step)]
        for needed in rounds:  # a stage may have groups replaced
            for _ in range(queue.room(needed, left=(steps - step) * per_step)):
                number = len(admitted)
                admitted[number] = step
                queue.admit(group(number), step)
            assert len(queue.groups) <= needed + staleness * per_step
            while (found := queue.take(step, needed)) is None:
                unready = [g for g in queue.groups if not g.ready]
                assert unready, "everything is ready, and the step still waits"
                moments.choice(unready[: 1 + int(moments.random() * len(unready))]).ready = True
            assert len(found) == needed
            assert [g.number for g in found] == sorted(g.number for g in found)
            taken |= {g.number: step for g in found}
    return admitted, taken, queue


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("per_step", [1, 3, 4])
def test_no_group_is_taken_later_than_the_rule_allows_whenever_groups_become_ready(
    per_step, staleness, in_order
):
    ahead = 0
    for seed in range(25):
        admitted, taken, _ = simulate(per_step, staleness, 15, in_order, seed)
        for number, step in taken.items():
            assert 0 <= step - admitted[number] <= staleness  # (s - 1) - (a - 1): the age of its oldest token
        ahead = max(ahead, *(step - admitted[number] for number, step in taken.items()))
    assert ahead == staleness  # the bound is reached


def test_without_staleness_a_step_takes_what_it_admits():
    admitted, taken, queue = simulate(4, 0, 15, False, 0)
    assert admitted == taken
    assert queue.groups == []
    assert queue.overtaken == 0


def test_a_group_that_is_ready_overtakes_one_that_is_not_until_that_is_due():
    queue = AheadQueue(prompts_per_step=1, max_staleness=2, in_order=False)
    for number in range(3):
        queue.admit(group(number), step=1)
    slow, second, third = queue.groups
    second.ready = third.ready = True
    assert queue.take(1, 1) == [second]
    assert queue.take(2, 1) == [third]
    assert queue.overtaken == 2
    queue.admit(group(3), step=3)
    queue.groups[-1].ready = True
    assert queue.take(3, 1) is None  # 1 + 2: due now
    slow.ready = True
    assert queue.take(3, 1) == [slow]


def test_two_late_groups_are_not_left_for_the_same_last_step():
    queue = AheadQueue(prompts_per_step=1, max_staleness=2, in_order=False)
    for number in range(3):
        queue.admit(group(number), step=1)
    queue.groups[2].ready = True
    assert [g.number for g in queue.take(1, 1)] == [2]
    queue.admit(group(3), step=2)
    queue.groups[-1].ready = True
    assert queue.take(2, 1) is None  # groups 0 and 1 would both have step 3 alone


def test_in_order_nothing_is_overtaken():
    queue = AheadQueue(prompts_per_step=1, max_staleness=2, in_order=True)
    for number in range(3):
        queue.admit(group(number), step=1)
    queue.groups[1].ready = True
    assert queue.take(1, 1) is None


def test_none_is_admitted_that_no_step_would_take():
    queue = AheadQueue(prompts_per_step=4, max_staleness=3, in_order=False)
    assert queue.room(needed=4, left=100) == 16
    assert queue.room(needed=4, left=4) == 8
    assert queue.room(needed=4, left=0) == 4
