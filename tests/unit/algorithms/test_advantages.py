import math
import random
import statistics

import pytest
import torch

from engine_core.algorithms import advantages as core
from engine_core.algorithms.advantages import batch_mean, dr_grpo, group_statistics, grpo, rloo, whiten
from engine_core.types import Batch
from engine_plugin_trainers.algorithms import advantages as further
from engine_plugin_trainers.algorithms.advantages import (
    gdpo,
    gpg,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
)

GROUPED = [dr_grpo, gdpo, gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, rloo]
ALL = [*GROUPED, batch_mean]


def make_batch(rewards, group_ids, valid=None, lengths=None, prompt=1, terms=None, weights=None):
    lengths = lengths or [3] * len(rewards)
    mask = torch.cat([torch.tensor([False] * prompt + [True] * (n - prompt)) for n in lengths])
    terms = terms if terms is not None else {"only": rewards}
    weights = weights or dict.fromkeys(terms, 1.0)
    sequences = {
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "group_ids": torch.tensor(group_ids),
        "response_lengths": torch.tensor([n - prompt for n in lengths]),
        "valid": torch.tensor(valid or [True] * len(rewards)),
    }
    for name, values in terms.items():
        sequences[f"reward_term/{name}"] = torch.tensor(values, dtype=torch.float64)
        sequences[f"reward_weight/{name}"] = torch.full((len(rewards),), weights[name])
    return Batch(
        token_ids=torch.arange(sum(lengths)),
        lengths=torch.tensor(lengths),
        tokens={"loss_mask": mask},
        sequences=sequences,
    )


def by_rollout(values, batch):
    """The one value that each rollout's sampled tokens share; elsewhere it must be 0."""
    found = []
    for tokens, mask in zip(
        values.split(batch.lengths.tolist()), batch["loss_mask"].split(batch.lengths.tolist()), strict=True
    ):
        assert (tokens[~mask] == 0).all()
        inside = tokens[mask].tolist()
        assert len(set(inside)) <= 1
        found.append(inside[0] if inside else 0.0)
    return found


def groups_of(batch):
    """Members of each group that count, by plain loops."""
    groups = {}
    for i, group in enumerate(batch["group_ids"].tolist()):
        if batch["valid"][i]:
            groups.setdefault(group, []).append(i)
    return groups.values()


# Each estimator once more, from its formula, with Python's floats.


def expected_grpo(batch, rewards=None, std=True):
    rewards = rewards or batch["rewards"].tolist()
    found = [0.0] * len(batch)
    for members in groups_of(batch):
        values = [rewards[i] for i in members if not math.isnan(rewards[i])]
        for i in members:
            if len(values) > 1 and not math.isnan(rewards[i]):
                found[i] = rewards[i] - statistics.fmean(values)
                found[i] /= statistics.stdev(values) + 1e-6 if std else 1.0
    return found


def expected_passk(batch):
    rewards, found = batch["rewards"].tolist(), [0.0] * len(batch)
    for members in groups_of(batch):
        best, *others = sorted(members, key=lambda i: -rewards[i])
        if others:
            std = statistics.stdev([rewards[i] for i in members])
            found[best] = (rewards[best] - rewards[others[0]]) / (std + 1e-6)
    return found


def expected_rloo(batch):
    rewards, found = batch["rewards"].tolist(), [0.0] * len(batch)
    for members in groups_of(batch):
        for i in members:
            others = [rewards[j] for j in members if j != i]
            found[i] = rewards[i] - statistics.fmean(others) if others else 0.0
    return found


def expected_opo(batch):
    rewards, lengths = batch["rewards"].tolist(), batch["response_lengths"].tolist()
    found = [0.0] * len(batch)
    for members in groups_of(batch):
        baseline = sum(lengths[i] * rewards[i] for i in members) / sum(lengths[i] for i in members)
        for i in members:
            found[i] = rewards[i] - baseline if len(members) > 1 else 0.0
    return found


def expected_gpg(batch):
    rewards = batch["rewards"].tolist()
    flat = sum(len(members) for members in groups_of(batch) if len({rewards[i] for i in members}) == 1)
    total = int(batch["valid"].sum())
    return [total / (total - flat) * value for value in expected_grpo(batch, std=False)]


def standardized(values):
    mean, variance = statistics.fmean(values), statistics.variance(values)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def expected_rfpp_baseline(batch):
    centred, sampled = expected_grpo(batch, std=False), (batch.lengths - 1).tolist()
    compared = [i for members in groups_of(batch) if len(members) > 1 for i in members]
    tokens = [(i, centred[i]) for i in compared for _ in range(sampled[i])]
    values = dict(zip([i for i, _ in tokens], standardized([value for _, value in tokens]), strict=True))
    return [values.get(i, 0.0) for i in range(len(batch))]


def expected_batch_mean(batch):
    rewards, valid = batch["rewards"].tolist(), batch["valid"].tolist()
    mean = statistics.fmean(r for r, v in zip(rewards, valid, strict=True) if v)
    return [r - mean if v else 0.0 for r, v in zip(rewards, valid, strict=True)]


FORMULAS = {
    grpo: expected_grpo,
    dr_grpo: lambda batch: expected_grpo(batch, std=False),
    grpo_passk: expected_passk,
    rloo: expected_rloo,
    opo: expected_opo,
    gpg: expected_gpg,
    reinforce_plus_plus_baseline: expected_rfpp_baseline,
    batch_mean: expected_batch_mean,
}


def mixed_batch(seed):
    """Groups of 1, 2, 3 and 5 in any order, one without spread, some rollouts not valid, lengths of 2 to 9."""
    rng = random.Random(seed)
    group_ids = [9] + [4] * 2 + [7] * 3 + [2] * 5 + [1] * 3
    rng.shuffle(group_ids)
    rewards = [0.5 if group == 1 else rng.choice([0.0, 0.25, 1.0, rng.gauss(0, 1)]) for group in group_ids]
    valid = [group != 2 or rng.random() < 0.7 for group in group_ids]
    lengths = [rng.randint(2, 9) for _ in group_ids]
    return make_batch(rewards, group_ids, valid, lengths)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimator", FORMULAS, ids=lambda f: f.__name__)
def test_an_estimator_is_its_formula(estimator, seed):
    batch = mixed_batch(seed)
    assert by_rollout(estimator(batch), batch) == pytest.approx(
        FORMULAS[estimator](batch), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ALL, ids=lambda f: f.__name__)
def test_the_order_of_the_rollouts_does_not_matter(estimator, seed):
    batch = mixed_batch(seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    mixed = batch.select(order)
    plain = by_rollout(estimator(batch), batch)
    assert by_rollout(estimator(mixed), mixed) == pytest.approx([plain[i] for i in order.tolist()], abs=1e-6)


@pytest.mark.parametrize("estimator", ALL, ids=lambda f: f.__name__)
def test_a_batch_of_one_has_nothing_to_be_compared_with(estimator):
    assert estimator(make_batch([5.0], [0])).tolist() == [0.0] * 3


@pytest.mark.parametrize("estimator", GROUPED, ids=lambda f: f.__name__)
def test_a_group_of_one_gets_nothing_beside_larger_groups(estimator):
    batch = make_batch([5.0, 1.0, 0.0, 3.0], [0, 1, 1, 1])
    assert by_rollout(estimator(batch), batch)[0] == 0.0


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
@pytest.mark.parametrize("estimator", ALL, ids=lambda f: f.__name__)
def test_equal_rewards_give_nothing(estimator, value):
    batch = make_batch([value] * 7, [0, 0, 0, 1, 1, 1, 1], lengths=[2, 3, 4, 5, 6, 7, 8])
    batch.sequences["rewards"] = batch["rewards"].float()  # as the core makes them
    assert by_rollout(estimator(batch), batch) == [0.0] * 7


@pytest.mark.parametrize("estimator", ALL, ids=lambda f: f.__name__)
def test_an_invalid_rollout_counts_nowhere_and_gets_nothing(estimator):
    nan = float("nan")
    with_it = make_batch(
        [1.0, nan, 0.0, 4.0, 2.0], [0, 0, 0, 1, 1], [True, False, True, True, True], [3, 9, 4, 5, 6]
    )
    without = make_batch([1.0, 0.0, 4.0, 2.0], [0, 0, 1, 1], lengths=[3, 4, 5, 6])
    values = by_rollout(estimator(with_it), with_it)
    assert values.pop(1) == 0.0
    assert values == pytest.approx(by_rollout(estimator(without), without))


@pytest.mark.parametrize("estimator", ALL, ids=lambda f: f.__name__)
def test_no_valid_rollout_and_no_rollout_give_nothing(estimator):
    batch = make_batch([1.0, 2.0], [0, 0], [False, False])
    assert estimator(batch).tolist() == [0.0] * 6
    assert estimator(batch.select([])).tolist() == []


@pytest.mark.parametrize("estimator", ALL, ids=lambda f: f.__name__)
def test_a_fully_masked_rollout_gets_nothing(estimator):
    batch = make_batch([1.0, 0.0, 3.0], [0, 0, 0])
    batch.tokens["loss_mask"][:3] = False
    values = estimator(batch)
    assert values[:3].tolist() == [0.0] * 3
    assert values.isfinite().all()


@pytest.mark.parametrize("estimator", ALL, ids=lambda f: f.__name__)
def test_advantages_are_float32(estimator):
    assert estimator(make_batch([1.0, 0.0], [0, 0])).dtype == torch.float32


def test_without_the_deviation_grpo_is_dr_grpo():
    batch = mixed_batch(1)
    assert torch.equal(grpo(batch, normalize_by_std=False), dr_grpo(batch))
    values = grpo(make_batch([1.0, 0.0, 0.0, 0.0], [0] * 4), normalize_by_std=False)
    assert values.view(4, 3)[:, 1].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_passk_without_the_deviation_is_the_lead_over_the_second():
    batch = make_batch([1.0, 4.0, 2.0], [0, 0, 0])
    assert by_rollout(grpo_passk(batch, normalize_by_std=False), batch) == [0.0, 2.0, 0.0]


def test_two_equal_bests_have_no_lead():
    batch = make_batch([4.0, 4.0, 2.0], [0, 0, 0])
    assert by_rollout(grpo_passk(batch), batch) == [0.0, 0.0, 0.0]


def test_gpg_divides_by_its_constant():
    batch = mixed_batch(0)
    assert torch.allclose(gpg(batch, f_norm=4.0) * 4, gpg(batch))


def test_rloo_of_two_is_the_difference():
    batch = make_batch([3.0, 1.0], [0, 0])
    assert by_rollout(rloo(batch), batch) == [2.0, -2.0]


def test_gdpo_normalises_each_reward_before_it_adds_them():
    terms = {"right": [1.0, 0.0, 0.0, 1.0, 1.0], "short": [10.0, 30.0, 20.0, 5.0, -5.0]}
    batch = make_batch([0.0] * 5, [0, 0, 0, 1, 1], terms=terms, weights={"right": 1.0, "short": 0.5})
    right, short = (expected_grpo(batch, terms[name]) for name in ("right", "short"))
    sums = [a + 0.5 * b for a, b in zip(right, short, strict=True)]
    assert by_rollout(gdpo(batch, whiten_batch=False), batch) == pytest.approx(sums, rel=1e-6)
    assert by_rollout(gdpo(batch), batch) == pytest.approx(standardized(sums), rel=1e-6)


def test_gdpo_does_not_care_for_the_scale_of_a_reward():
    small = {"right": [1.0, 0.0, 0.0], "short": [0.1, 0.3, 0.2]}
    large = {"right": small["right"], "short": [1000 * value for value in small["short"]]}
    one, other = (make_batch([0.0] * 3, [0] * 3, terms=terms) for terms in (small, large))
    assert torch.allclose(gdpo(one), gdpo(other), atol=1e-4)


def test_gdpo_leaves_a_reward_out_where_it_does_not_apply():
    nan = float("nan")
    terms = {"right": [1.0, 0.0, 0.0], "style": [nan, 2.0, 1.0]}
    batch = make_batch([0.0] * 3, [0] * 3, terms=terms)
    right, style = expected_grpo(batch, terms["right"]), expected_grpo(batch, terms["style"])
    sums = [a + b for a, b in zip(right, style, strict=True)]
    assert style[0] == 0.0
    assert by_rollout(gdpo(batch, whiten_batch=False), batch) == pytest.approx(sums, rel=1e-6)


def test_whitening_is_over_what_counts():
    values = torch.tensor([1.0, 2.0, 6.0, 100.0], dtype=torch.float64)
    found = whiten(values, torch.tensor([True, True, True, False]))
    assert found.tolist() == pytest.approx([*standardized([1.0, 2.0, 6.0]), 0.0])


def test_statistics_of_an_empty_batch_are_empty():
    empty = torch.zeros(0)
    mean, std, count = group_statistics(
        empty, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    )
    assert mean.numel() == std.numel() == count.numel() == 0


def test_every_estimator_here_is_tried():
    offered = {
        name
        for name, value in {**vars(core), **vars(further)}.items()
        if callable(value) and "Formula:" in (value.__doc__ or "")
    }
    offered -= {"distill", "reinforce_plus_plus", "remax"}  # of tokens: test_advantages_tokens
    assert offered == {estimator.__name__ for estimator in ALL} == {f.__name__ for f in FORMULAS} | {"gdpo"}


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 1e-4])
def test_grpo_adds_epsilon_to_what_divides(epsilon):
    batch = make_batch([1.0, 2.0, 4.0], [0, 0, 0])
    found = by_rollout(grpo(batch, epsilon=epsilon), batch)
    divisor = statistics.stdev([1.0, 2.0, 4.0]) + epsilon
    assert found == pytest.approx([(r - 7 / 3) / divisor for r in (1.0, 2.0, 4.0)], rel=1e-6)
