"""The versions of sampled tokens, by stretches: what looking at each token would say."""

from types import SimpleNamespace

import pytest
import torch

from engine_plugin_trainers.policy_versions import version_runs


def rollout(versions, sampled):
    return SimpleNamespace(
        policy_versions=torch.tensor(versions, dtype=torch.int32),
        loss_mask=torch.tensor(sampled, dtype=torch.bool),
    )


def test_a_stretch_is_of_one_version_and_of_one_rollout():
    found = version_runs([rollout([0, 0, 3, 3, 4], [0, 0, 1, 1, 1]), rollout([4, 4], [1, 1])])
    assert found.versions.tolist() == [3, 4, 4]
    assert found.counts.tolist() == [2, 1, 2]
    assert found.of.tolist() == [0, 0, 1]
    assert found.oldest() == {0: 3, 1: 4}
    assert found.mixed() == 1


def test_what_was_not_sampled_is_of_no_version():
    found = version_runs([rollout([], []), rollout([1, 2, 3], [0, 0, 0]), rollout([5, 9, 5], [1, 0, 1])])
    assert found.oldest() == {2: 5}
    assert found.counts.sum() == 2
    assert found.mixed() == 0


@pytest.mark.parametrize("rollouts", [[], [rollout([], [])]], ids=["none", "an empty one"])
def test_without_a_token_there_is_no_stretch(rollouts):
    found = version_runs(rollouts)
    assert (len(found.versions), found.oldest(), found.mixed()) == (0, {}, 0)


@pytest.mark.parametrize("seed", range(20))
def test_stretches_say_what_a_look_at_each_token_says(seed):
    drawn = torch.Generator().manual_seed(seed)

    def one():
        length = int(torch.randint(0, 8, (), generator=drawn))
        versions = torch.randint(0, 3, (length,), generator=drawn).tolist()
        return rollout(versions, (torch.rand(length, generator=drawn) > 0.4).tolist())

    rollouts = [one() for _ in range(6)]
    found, sampled = version_runs(rollouts), [r.policy_versions[r.loss_mask].tolist() for r in rollouts]
    assert found.oldest() == {place: min(of) for place, of in enumerate(sampled) if of}
    assert found.mixed() == sum(len(set(of)) > 1 for of in sampled)
    assert int(found.counts.sum()) == sum(map(len, sampled))
    assert int((found.versions * found.counts).sum()) == sum(map(sum, sampled))
