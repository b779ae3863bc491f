import pytest
import torch

from engine_core.algorithms.entropy import AdaptiveEntropy, high_entropy


def test_the_weight_rises_under_the_target_falls_over_it_and_never_below_0():
    held = AdaptiveEntropy(0.0)
    seen = []
    for entropy in (0.1, 0.1, 0.2, 0.9, 0.9, 0.1):
        held.update(entropy, target=0.2, delta=0.01)
        seen.append((round(held.coef, 6), round(held.applied, 6)))
    assert seen == [(0.01, 0.01), (0.02, 0.02), (0.01, 0.01), (0.0, 0.0), (0.0, 0.0), (0.01, 0.01)]


def test_it_is_applied_only_while_the_entropy_is_at_most_the_target():
    held = AdaptiveEntropy(0.5)
    assert held.applied == 0.5  # nothing was measured yet
    held.update(0.3, target=0.2, delta=0.01)
    assert (held.applied, held.coef) == (0.0, pytest.approx(0.49))


@pytest.mark.parametrize(
    ("share", "kept"), [(0.2, {4}), (0.21, {4, 2}), (0.5, {4, 2, 5}), (1.0, {1, 2, 3, 4, 5})]
)
def test_the_share_of_loss_tokens_with_the_highest_entropy_is_kept(share, kept):
    entropy = torch.tensor([9.0, 0.1, 0.8, 0.2, 0.9, 0.3, 9.0])
    mask = torch.tensor([0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    assert set(high_entropy(entropy, mask, share).nonzero().flatten().tolist()) == kept


def test_ties_at_the_bound_are_all_kept_and_no_token_gives_none():
    tied = torch.full((3,), 0.5)
    assert high_entropy(tied, torch.ones(3, dtype=torch.bool), 0.3).all()
    assert not high_entropy(tied, torch.zeros(3, dtype=torch.bool), 0.3).any()
