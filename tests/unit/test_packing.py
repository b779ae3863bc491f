"""Micro-batch plans, by properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.packing import plan_micro_batches

LENGTHS = st.lists(st.integers(0, 60), max_size=60)


@given(LENGTHS, st.integers(1, 100), st.randoms(use_true_random=False))
def test_every_sequence_is_in_one_micro_batch_and_groups_are_whole(lengths, budget, random):
    ids = [random.randrange(1 + len(lengths) // 2) for _ in lengths]
    plan = plan_micro_batches(lengths, budget, ids)
    assert sorted(i for members in plan for i in members) == list(range(len(lengths)))
    assert all(members == sorted(members) for members in plan)
    home = {}
    for number, members in enumerate(plan):
        for index in members:
            assert home.setdefault(ids[index], number) == number


@given(LENGTHS, st.integers(1, 100))
def test_the_budget_is_kept_except_by_a_longer_sequence_which_is_alone(lengths, budget):
    for members in plan_micro_batches(lengths, budget):
        tokens = sum(lengths[i] for i in members)
        assert tokens <= budget or [lengths[i] > budget for i in members if lengths[i]] == [True]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 200))
def test_the_plan_is_near_the_fewest_possible(lengths, budget):
    fewest = max(-(-sum(lengths) // budget), sum(2 * n > budget for n in lengths))
    assert len(plan_micro_batches(lengths, budget)) <= 11 / 9 * fewest + 1


def test_a_worked_example():
    # descending: 8 (1), 4 (0), 4 (3), 2 (4), 1 (2), 1 (5): [8 2], [4 4 1 1]
    assert plan_micro_batches([4, 8, 1, 4, 2, 1], 10) == [[0, 2, 3, 5], [1, 4]]


def test_realistic_lengths_fill_at_least_95_percent():
    lengths = [200 + (i * 7919) % 1800 for i in range(512)]
    plan = plan_micro_batches(lengths, 16384)
    assert sum(lengths) / (len(plan) * 16384) > 0.95


def test_a_plan_is_filled_up_with_empty_micro_batches_to_a_count():
    assert plan_micro_batches([3, 3], 3, count=4) == [[0], [1], [], []]
    assert plan_micro_batches([3, 3], 3, count=1) == [[0], [1]]
    assert plan_micro_batches([], 3) == []


def test_a_budget_of_0_is_refused():
    with pytest.raises(ValueError, match="token budget of a micro-batch is 0; it must be at least 1"):
        plan_micro_batches([1], 0)
