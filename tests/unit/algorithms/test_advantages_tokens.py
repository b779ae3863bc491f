import math
import random
import statistics

import pytest
import torch

from engine_core.algorithms.advantages_tokens import discounted, gae, reinforce, sampled, token_rewards
from engine_core.types import Batch
from engine_plugin_trainers.algorithms.advantages import distill, reinforce_plus_plus, remax


def make_batch(masks, rewards, valid=None, **columns):
    """A batch of rollouts with these masks ("0110": prompt, two sampled tokens, an observation)."""
    tokens = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    tokens["loss_mask"] = torch.tensor([c == "1" for mask in masks for c in mask])
    return Batch(
        token_ids=torch.arange(sum(map(len, masks))),
        lengths=torch.tensor([len(mask) for mask in masks]),
        tokens=tokens,
        sequences={
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "valid": torch.tensor(valid or [True] * len(masks)),
        },
    )


def random_batch(seed):
    rng = random.Random(seed)
    masks = ["0" + "".join(rng.choice("1101") for _ in range(rng.randint(1, 12))) for _ in range(6)] + ["000"]
    count = sum(map(len, masks))
    return make_batch(
        masks,
        [rng.gauss(0, 1) for _ in masks],
        [True, False, True, True, True, True, True],
        values=[rng.gauss(0, 1) for _ in range(count)],
        kl_penalty=[rng.gauss(0, 0.1) for _ in range(count)],
    )


def rollouts_of(batch):
    """Of each valid rollout: the positions of its sampled tokens, and what each earned."""
    start = 0
    for i, length in enumerate(batch.lengths.tolist()):
        places = [t for t in range(start, start + length) if batch["loss_mask"][t] and batch["valid"][i]]
        earned = [-float(batch["kl_penalty"][t]) if "kl_penalty" in batch else 0.0 for t in places]
        if places:
            earned[-1] += float(batch["rewards"][i]) - sum(earned)
        yield places, earned
        start += length


def expected_returns(batch, gamma):
    found = [0.0] * batch.num_tokens
    for places, earned in rollouts_of(batch):
        for k, t in enumerate(places):
            found[t] = sum(gamma**j * earned[k + j] for j in range(len(places) - k))
    return found


def standardized(values, batch):
    inside = [values[t] for places, _ in rollouts_of(batch) for t in places]
    mean, deviation = statistics.fmean(inside), math.sqrt(statistics.variance(inside) + 1e-8)
    found = [0.0] * len(values)
    for places, _ in rollouts_of(batch):
        for t in places:
            found[t] = (values[t] - mean) / deviation
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_is_the_discounted_sum_of_what_follows(gamma, seed):
    batch = random_batch(seed)
    assert reinforce(batch, gamma=gamma).tolist() == pytest.approx(expected_returns(batch, gamma), abs=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_standardises_the_returns_over_the_batch(gamma):
    batch = random_batch(1)
    expected = standardized(expected_returns(batch, gamma), batch)
    assert reinforce_plus_plus(batch, gamma=gamma).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0), (1.0, 0.5)])
def test_gae_is_the_discounted_sum_of_its_residuals(gamma, lam, seed):
    batch = random_batch(seed)
    values = batch["values"].tolist()
    expected, returns = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    for places, earned in rollouts_of(batch):
        ahead = [*(values[t] for t in places[1:]), *[0.0][: len(places)]]
        residuals = [r + gamma * v - values[t] for r, v, t in zip(earned, ahead, places, strict=True)]
        for k, t in enumerate(places):
            expected[t] = sum((gamma * lam) ** j * residuals[k + j] for j in range(len(places) - k))
            returns[t] = expected[t] + values[t]
    found = gae(batch, gamma=gamma, lam=lam, whiten_batch=False)
    assert found["advantages"].tolist() == pytest.approx(expected, abs=1e-6)
    assert found["returns"].tolist() == pytest.approx(returns, abs=1e-6)
    whitened = gae(batch, gamma=gamma, lam=lam)
    assert whitened["advantages"].tolist() == pytest.approx(standardized(expected, batch), abs=1e-5)
    assert torch.equal(whitened["returns"], found["returns"])  # the critic learns what was not whitened


def test_gae_with_a_whole_trace_is_the_return_less_the_value():
    batch = random_batch(2)
    found = gae(batch, whiten_batch=False)
    expected = [
        g - v if s else 0.0
        for g, v, s in zip(
            expected_returns(batch, 1.0), batch["values"].tolist(), sampled(batch).tolist(), strict=True
        )
    ]
    assert found["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


def test_an_observation_discounts_nothing():
    plain = make_batch(["011"], [1.0], values=[0.0, 0.3, 0.6])
    observed = make_batch(["010001"], [1.0], values=[0.0, 0.3, 9.0, 9.0, 9.0, 0.6])
    for estimator in (
        lambda b: gae(b, gamma=0.9, lam=0.8, whiten_batch=False)["advantages"],
        lambda b: reinforce(b, gamma=0.5),
    ):
        assert estimator(observed)[[1, 5]].tolist() == pytest.approx(estimator(plain)[[1, 2]].tolist())
        assert estimator(observed)[2:5].tolist() == [0.0] * 3


def test_token_rewards_add_up_to_the_reward():
    batch = random_batch(3)
    totals = batch.sum_by_sequence(token_rewards(batch))
    anything = batch.sum_by_sequence(sampled(batch).double()) > 0
    assert torch.allclose(totals, torch.where(anything, batch["rewards"], 0.0))


def test_the_reward_stands_at_the_last_sampled_token():
    batch = make_batch(["01100", "0011"], [5.0, 7.0])
    assert token_rewards(batch).tolist() == [0, 0, 5, 0, 0, 0, 0, 0, 7]


def test_remax_takes_the_greedy_reward_off():
    batch = random_batch(0)
    greedy = [0.5, 0.1, math.nan, -1.0, 0.0, 2.0, 1.0]
    batch.sequences["greedy_rewards"] = torch.tensor(greedy)
    returns, expected = expected_returns(batch, 1.0), [0.0] * batch.num_tokens
    for (places, _), baseline in zip(rollouts_of(batch), greedy, strict=True):
        for t in places:
            expected[t] = 0.0 if math.isnan(baseline) else returns[t] - baseline
    assert remax(batch).tolist() == pytest.approx(expected, abs=1e-6)


def test_remax_of_a_response_as_good_as_the_greedy_one_is_nothing():
    batch = make_batch(["011", "01"], [1.0, 1.0])
    batch.sequences["greedy_rewards"] = torch.tensor([1.0, 1.0])
    assert remax(batch).tolist() == [0.0] * 5


def run(name, batch):
    batch.sequences["greedy_rewards"] = batch["rewards"].clone()
    batch.tokens.setdefault("values", torch.zeros(batch.num_tokens, dtype=torch.float64))
    made = {"gae": gae, "reinforce": reinforce, "reinforce_plus_plus": reinforce_plus_plus, "remax": remax}[
        name
    ](batch)
    return list(made.values()) if isinstance(made, dict) else [made]


NAMES = ["gae", "reinforce", "reinforce_plus_plus", "remax"]


@pytest.mark.parametrize("name", NAMES)
def test_invalid_and_fully_masked_rollouts_get_nothing_and_change_nothing(name):
    nan = float("nan")
    batch = make_batch(["011", "0111", "0000", "01"], [1.0, nan, 3.0, 0.5], [True, False, True, True])
    alone = make_batch(["011", "01"], [1.0, 0.5])
    for found, expected in zip(run(name, batch), run(name, alone), strict=True):
        assert found.dtype == torch.float32
        assert found[3:11].tolist() == [0.0] * 8
        assert found[[0, 1, 2, 11, 12]].tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_sampled_gives_nothing(name):
    for batch in (make_batch(["000", "0"], [1.0, 2.0]), make_batch(["01"], [1.0]).select([])):
        for found in run(name, batch):
            assert found.tolist() == [0.0] * batch.num_tokens


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_equal_rewards_and_one_sampled_token_are_whitened_to_nothing(name):
    equal = make_batch(["0111", "01", "011"], [0.25, 0.25, 0.25])
    assert run(name, equal)[0].tolist() == [0.0] * 9
    assert run(name, make_batch(["01"], [3.0]))[0].tolist() == [0.0, 0.0]


def test_a_recursion_stays_within_its_sequence():
    batch = make_batch(["11", "11"], [0.0, 0.0])
    ones = torch.ones(4, dtype=torch.float64)
    assert discounted(ones, batch["loss_mask"], batch, 0.5).tolist() == [1.5, 1.0, 1.5, 1.0]


def test_the_gap_to_the_teacher_is_the_tokens_own_or_with_those_after_it_and_not_of_observations():
    gaps = {
        "teacher_log_probs": [0.0, -1.0, -2.0, 9.0, -1.0, 7.0, -3.0],
        "old_log_probs": [5.0, -2.0, -1.5, 4.0, -3.0, 1.0, -3.5],
    }
    batch = make_batch(["01101", "01"], [math.nan, math.nan], **gaps)
    assert distill(batch).tolist() == [0.0, 1.0, -0.5, 0.0, 2.0, 0.0, 0.5]
    assert distill(batch, gamma=0.5).tolist() == [
        0.0,
        1.0 + 0.5 * (-0.5 + 1.0),
        -0.5 + 1.0,
        0.0,
        2.0,
        0.0,
        0.5,
    ]
    invalid = make_batch(["01101", "01"], [0.0, 0.0], [False, True], **gaps)
    assert distill(invalid).tolist() == [0.0] * 6 + [0.5]


def test_the_mean_over_all_tokens_that_may_be_sampled_is_the_gradient_of_the_reverse_kl():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    found, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    log_probs = found.log_softmax(-1)
    batch = make_batch(
        ["1"] * 7,
        [0.0] * 7,
        old_log_probs=log_probs.tolist(),
        teacher_log_probs=teacher.log_softmax(-1).tolist(),
    )
    chance = log_probs.detach().exp()
    (-(chance * distill(batch).double() * log_probs).sum()).backward()
    p = other.softmax(-1)
    (p * (p / teacher.softmax(-1)).log()).sum().backward()
    torch.testing.assert_close(found.grad, other.grad, rtol=0, atol=1e-7)
