"""Partitions of sequences over ranks, by properties."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_plugin_processes.balance import attention_share, partition, sequence_cost

COSTS = st.lists(st.integers(0, 60), max_size=60)


@given(COSTS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_partition_holds_every_sequence_once_and_groups_whole(costs, parts, random):
    ids = [random.randrange(1 + len(costs) // 2) for _ in costs]
    found = partition(costs, parts, ids)
    assert len(found) == parts
    assert sorted(i for members in found for i in members) == list(range(len(costs)))
    assert all(members == sorted(members) for members in found)
    homes = {(ids[i], number) for number, members in enumerate(found) for i in members}
    assert len(homes) == len(set(ids))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_a_partition_is_near_the_best_that_brute_force_finds(costs, parts):
    def heaviest(homes):
        return max(sum(c for c, h in zip(costs, homes, strict=True) if h == part) for part in range(parts))

    best = min(map(heaviest, itertools.product(range(parts), repeat=len(costs))))
    found = max(sum(costs[i] for i in members) for members in partition(costs, parts))
    assert best <= found <= (4 / 3 - 1 / (3 * parts)) * best


def test_a_worked_partition():
    # 8 | 7, 8 | 13, 13 | 13, 17 | 13: where 15 and 15 is possible
    assert partition([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]


def test_one_part_is_the_batch_in_its_order_and_parts_may_be_empty():
    assert partition([3, 9, 1], 1) == [[0, 1, 2]]
    assert partition([5], 3) == [[0], [], []]
    assert partition([], 2) == [[], []]


def test_many_sequences_are_even_within_a_thousandth():
    costs = [200 + (i * 7919) % 1800 for i in range(512)]
    sums = [sum(costs[i] for i in members) for members in partition(costs, 8)]
    assert max(sums) <= 1.001 * sum(costs) / 8


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="cannot be split into 0 parts"):
        partition([1], 0)


def test_the_cost_of_a_sequence_counts_its_attention():
    # 2 layers of width 8, 1,000 weights: attention of 100 tokens is 2 * 8 * 100^2 / 1000 = 160 tokens' work
    share = attention_share(2, 8, 1000)
    assert sequence_cost(100, share) == pytest.approx(100 + 160)
    assert sequence_cost(100) == 100
    # one sequence of 1,000 tokens is more work than ten of 100, so it is not balanced by them
    lengths = [1000] + [100] * 12
    by_tokens = partition([sequence_cost(n) for n in lengths], 2)
    assert [len(members) for members in by_tokens] == [2, 11]
    assert partition([sequence_cost(n, share) for n in lengths], 2) == [[0], [*range(1, 13)]]
