"""The rule of running ahead in every order in which groups can become ready, of small runs: what the proof says of all of them."""

import itertools

import pytest

from engine_core.types import Prompt
from engine_plugin_trainers.ahead import AheadQueue, Group

ROUNDS = 3  # of a step, at most: stages may have groups replaced
PROMPT = Prompt("train:0", [1], "")


def queue_of(per_step, staleness, in_order, groups):
    """One that holds these, each as (last step that may take it, whether it is ready)."""
    queue = AheadQueue(per_step, staleness, in_order)
    queue.groups = [Group(number, PROMPT, due=due, ready=ready) for number, (due, ready) in enumerate(groups)]
    return queue


def after_round(per_step, staleness, in_order, step, needed, groups):
    """All queues that a round may leave, each as (due, ready, admitted in), with the ages of what it took.

    Args:
        groups: the queue before it, as these.
    """
    queue = queue_of(per_step, staleness, in_order, [each[:2] for each in groups])
    admitted = [each[2] for each in groups]
    for _ in range(queue.room(needed, left=1_000_000)):
        queue.admit(Group(len(admitted), PROMPT), step)
        admitted.append(step)
    assert len(queue.groups) <= needed + staleness * per_step
    before = [(group.due, group.ready) for group in queue.groups]
    unready = [place for place, (_, ready) in enumerate(before) if not ready]
    for count in range(len(unready) + 1):
        for now in itertools.combinations(unready, count):
            looked = queue_of(
                per_step,
                staleness,
                in_order,
                [(due, ready or place in now) for place, (due, ready) in enumerate(before)],
            )
            first_are_ready = all(group.ready for group in looked.groups[:needed])
            taken = looked.take(step, needed)
            waited = queue_of(per_step, staleness, in_order, before)
            if waited.take(step, needed) is None:
                for place in now:
                    waited.groups[place].ready = True
                assert numbers(waited.take(step, needed)) == numbers(taken), "it remembers what is over"
            if taken is None:
                assert not first_are_ready, "it waits although the first that it asked for are ready"
                continue
            assert len(taken) == needed
            assert all(group.ready for group in taken)
            assert all(group.due > step for group in looked.groups), "one is left behind when it is due"
            left = [(group.due, group.ready, admitted[group.number]) for group in looked.groups]
            yield tuple(left), [step - admitted[group.number] for group in taken]


def numbers(groups):
    return groups and [group.number for group in groups]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("per_step", "staleness"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
def test_no_order_in_which_groups_become_ready_makes_one_too_old_or_a_step_wait_in_vain(
    per_step, staleness, in_order
):
    last, oldest, seen = staleness + 4, 0, set()
    states = [(1, 0, ())]
    while states:
        state = states.pop()
        if state in seen or state[0] > last:
            continue
        seen.add(state)
        step, number, groups = state
        if number:
            states.append((step + 1, 0, groups))  # the step's last round was that
        for needed in range(1, per_step + 1) if 0 < number < ROUNDS else [per_step] * (number == 0):
            for left, ages in after_round(per_step, staleness, in_order, step, needed, groups):
                assert max(ages) <= staleness
                oldest = max(oldest, *ages)
                states.append((step, number + 1, left))
    assert oldest == staleness  # the bound is reached
    assert len(seen) > 25
