import dataclasses
from collections import Counter

import pytest
import torch

from engine_core.types import Prompt, Rollout
from engine_plugin_trainers.algorithms.replay_cache import ReplayCache


def group(number, version, size=2, step=0, sampled=2):
    """``size`` rollouts of one prompt, sampled by policy ``version``."""
    return [
        Rollout(
            request_id=f"{step}:{number}:{index}",
            prompt=Prompt(f"p{number}", [1], ""),
            token_ids=torch.arange(1 + sampled),
            loss_mask=torch.tensor([False] + [True] * sampled),
            rollout_log_probs=-torch.rand(1 + sampled),
            policy_versions=torch.tensor([0] + [version] * sampled, dtype=torch.int32),
            finish_reason="stop",
            group_id=number,
            index=index,
            reward=float(index),
            rewards={"r": float(index)},
        )
        for index in range(size)
    ]


def step_of(number, groups=2, **changes):
    """The rollouts of step ``number``, by policy ``number - 1``."""
    return [r for i in range(groups) for r in group(i, number - 1, step=number, **changes)]


def ids(rollouts):
    return [rollout.request_id for rollout in rollouts]


def test_a_step_gets_groups_of_earlier_steps_and_none_of_its_own():
    cache = ReplayCache(share=0.5)
    first, noted = cache(step_of(1), 1)
    assert ids(first) == ids(step_of(1))
    assert noted == {"share": 0.0, "size": 2.0, "too_old": 0.0}
    second, noted = cache(step_of(2), 2)
    assert Counter(name.split(":")[0] for name in ids(second)) == {"1": 4, "2": 4}
    assert noted == {"share": 0.5, "size": 4.0, "too_old": 0.0, "age_mean": 1.0, "age_max": 1.0}


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.2, 1), (0.5, 4), (0.75, 12), (0.9, 16)])
def test_the_share_is_of_the_batch_and_at_most_what_is_there(share, expected):
    cache = ReplayCache(share=share, max_staleness=100)
    for step in range(1, 5):
        cache(step_of(step, groups=4), step)
    batch, noted = cache(step_of(5, groups=4), 5)
    assert len({rollout.group_id for rollout in batch}) == 4 + expected
    assert noted["share"] == pytest.approx(expected / (4 + expected))


def test_groups_stay_whole_and_have_ids_of_their_own():
    cache = ReplayCache(share=0.5)
    for step in (1, 2, 3):
        batch, _ = cache(step_of(step, groups=3, size=4), step)
    groups = {}
    for rollout in batch:
        groups.setdefault(rollout.group_id, []).append(rollout)
    assert sorted(groups) == list(range(6))
    for members in groups.values():
        assert [r.index for r in members] == [0, 1, 2, 3]
        assert len({r.request_id.rpartition(":")[0] for r in members}) == 1


def test_new_and_old_groups_alternate_so_that_each_mini_batch_has_both():
    cache = ReplayCache(share=0.5)
    cache(step_of(1, groups=4), 1)
    batch, _ = cache(step_of(2, groups=4), 2)
    steps = [next(r.request_id[0] for r in batch if r.group_id == number) for number in range(8)]
    assert steps == ["2", "1"] * 4


def test_what_comes_back_is_as_it_was_sampled():
    cache = ReplayCache(share=0.5)
    sampled = step_of(1)
    cache(sampled, 1)
    back = [r for r in cache(step_of(2), 2)[0] if r.request_id.startswith("1:")]
    for then, now in zip(sampled, sorted(back, key=lambda r: r.request_id), strict=True):
        assert dataclasses.replace(now, group_id=then.group_id) == then
        assert now.rollout_log_probs is then.rollout_log_probs


def test_what_a_later_stage_does_to_a_rollout_is_not_done_to_the_cache():
    cache = ReplayCache(share=0.5)
    first, _ = cache(step_of(1), 1)
    second, _ = cache(step_of(2), 2)
    for rollout in first + second:
        rollout.reward, rollout.valid = 99.0, False
        rollout.rewards["r"] = 99.0
        rollout.extras["x"] = torch.zeros(3)
    kept = [r for g in cache.groups for r in g]
    assert {r.reward for r in kept} == {0.0, 1.0}
    assert all(r.valid and r.rewards["r"] < 2 and not r.extras for r in kept)


def test_the_oldest_groups_leave_a_full_cache():
    cache = ReplayCache(size=3, share=0.9, max_staleness=100)
    for step in (1, 2, 3):
        cache(step_of(step), step)
    assert [g[0].request_id for g in cache.groups] == ["2:1:0", "3:0:0", "3:1:0"]


def test_a_group_leaves_when_its_oldest_token_is_too_many_versions_behind():
    cache = ReplayCache(max_staleness=2, share=0.9)
    mixed = group(0, 5)
    mixed[1].policy_versions[1] = 3  # sampled while weights changed
    cache([*mixed, *group(1, 4), *group(2, 5)], 6)
    batch, noted = cache(group(0, 6, step=7), 7)
    assert (noted["too_old"], noted["size"], noted["age_max"]) == (1.0, 3.0, 2.0)
    assert {r.prompt.id for r in batch if r.request_id.startswith("0:")} == {"p1", "p2"}


def test_versions_that_stand_still_are_no_age():
    cache = ReplayCache(max_staleness=1, share=0.5)
    for step in range(1, 6):  # only the critic learns
        _, noted = cache(group(0, 0, step=step), step)
    assert noted["size"] == 5
    assert noted["age_max"] == 0


def test_a_group_without_a_sampled_token_is_not_kept():
    cache = ReplayCache()
    assert cache(group(0, 1, sampled=0), 1)[1]["size"] == 0
    cache([*group(0, 1, sampled=0), *group(1, 1)], 2)
    assert [g[0].prompt.id for g in cache.groups] == ["p1"]


def test_a_step_without_a_new_group_draws_none_and_keeps_the_cache():
    cache = ReplayCache(share=0.5)
    cache(step_of(1), 1)
    assert cache([], 2) == ([], {"share": 0.0, "size": 2.0, "too_old": 0.0})


def test_the_draw_depends_on_seed_and_step_alone():
    def drawn(seed, step):
        cache = ReplayCache(share=0.2, seed=seed, max_staleness=100)
        cache(step_of(1, groups=64), 1)
        return ids(r for r in cache(step_of(2, groups=16), step)[0] if r.request_id.startswith("1:"))

    assert drawn(0, 2) == drawn(0, 2)
    assert len({tuple(drawn(0, 2)), tuple(drawn(1, 2)), tuple(drawn(0, 3))}) == 3


def test_every_group_comes_back_equally_often():
    counts = Counter()
    for seed in range(2000):
        cache = ReplayCache(share=0.5, seed=seed)
        cache(step_of(1, groups=4, size=1), 1)
        counts.update(
            r.prompt.id for r in cache(step_of(2, groups=1, size=1), 2)[0] if r.request_id[0] == "1"
        )
    assert sum(counts.values()) == 2000
    assert all(abs(counts[f"p{i}"] - 500) < 90 for i in range(4))  # 4.6 standard deviations


def test_a_cache_from_its_state_goes_on_as_the_old_one():
    cache, other = ReplayCache(share=0.5, size=5), ReplayCache(share=0.5, size=5)
    for step in (1, 2, 3):
        cache(step_of(step), step)
    state = cache.state()
    before = list(state.rollouts)
    other.load_state(state)
    for step in (4, 5):
        new = step_of(step)
        a, b = cache(new, step), other(new, step)
        assert (ids(a[0]), [r.group_id for r in a[0]], a[1]) == (ids(b[0]), [r.group_id for r in b[0]], b[1])
    assert list(state.rollouts) == before  # a snapshot
    assert cache.state().values == other.state().values == {"stored": 10}


def test_a_smaller_cache_takes_the_newest_of_a_larger_ones_state():
    cache, smaller = ReplayCache(), ReplayCache(size=2)
    for step in (1, 2):
        cache(step_of(step), step)
    smaller.load_state(cache.state())
    assert [g[0].request_id for g in smaller.groups] == ["2:0:0", "2:1:0"]
