"""Objectives over pairs, judgements and scores against plain loops, whole and in parts."""

import itertools
import math

import pytest
import torch

from engine_core.algorithms.objectives import resolve_loss
from engine_core.errors import PluginError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, LossCall
from engine_plugin_trainers.algorithms.preference_columns import with_shares
from engine_plugin_trainers.algorithms.preference_objectives import kto, mismatch_kl, preference, reward_model
from engine_plugin_trainers.tables import PairLoss

LENGTHS = [(2, 1), (1, 3), (2, 2)]  # tokens of the chosen and the rejected response of each pair


def sigma(x):
    return 1 / (1 + math.exp(-x))


def log_sigma(x):
    return math.log(sigma(x))


def sequences(lengths, **columns):
    """Responses of these lengths after prompts of one token, with log-probs of their tokens and the reference's."""
    counts = [1 + n for n in lengths]
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    return Batch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        lengths=torch.tensor(counts),
        tokens={
            "loss_mask": torch.tensor([k >= 1 for n in counts for k in range(n)]),
            "log_probs": -torch.rand(total, generator=generator, dtype=torch.float64),
            "ref_log_probs": -torch.rand(total, generator=generator, dtype=torch.float64),
        },
        sequences=columns,
    )


def pairs():
    batch = sequences([n for pair in LENGTHS for n in pair], chosen=torch.tensor([True, False] * 3))
    batch.keep_together = torch.arange(3).repeat_interleave(2)
    return with_shares(batch)


def by_sequence(batch, name):
    """Lists of each response's values."""
    ends = batch.offsets.tolist()
    return [batch[name][a + 1 : b].tolist() for a, b in itertools.pairwise(ends)]


def run(objective, batch, **options):
    log_probs = batch["log_probs"].clone().requires_grad_()
    total, metrics = objective({"log_probs": log_probs}, batch, **options)
    total.backward()
    return total.item(), {name: float(value) for name, value in metrics.items()}, log_probs.grad


def test_dpo_is_the_mean_over_pairs_of_a_plain_loop():
    batch, beta = pairs(), 0.4
    own, ref = (by_sequence(batch, name) for name in ("log_probs", "ref_log_probs"))
    rewards = [beta * (sum(a) - sum(b)) for a, b in zip(own, ref, strict=True)]
    gaps = [c - r for c, r in zip(rewards[::2], rewards[1::2], strict=True)]
    total, metrics, grad = run(preference, batch, loss="sigmoid", beta=beta)
    assert total == pytest.approx(sum(-log_sigma(gap) for gap in gaps) / 3, rel=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(sum(rewards[::2]) / 3, rel=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx(sum(rewards[1::2]) / 3, rel=1e-6)
    assert metrics["rewards/margin"] == pytest.approx(sum(gaps) / 3, rel=1e-6)
    assert metrics["rewards/accuracy"] == pytest.approx(sum(gap > 0 for gap in gaps) / 3, rel=1e-6)
    assert metrics["logps/chosen"] == pytest.approx(sum(map(sum, own[::2])) / 3, rel=1e-6)
    assert metrics["logps/rejected"] == pytest.approx(sum(map(sum, own[1::2])) / 3, rel=1e-6)
    slopes = [-beta * sigma(-gap) / 3 for gap in gaps]  # of each token of the chosen response
    expected = [
        [0.0] + [sign * s] * n
        for s, pair in zip(slopes, LENGTHS, strict=True)
        for sign, n in zip((1, -1), pair, strict=True)
    ]
    assert grad.tolist() == pytest.approx([slope for part in expected for slope in part], rel=1e-6)


def test_means_over_tokens_where_the_loss_normalises():
    batch, beta = pairs(), 0.4
    own, ref = (by_sequence(batch, name) for name in ("log_probs", "ref_log_probs"))
    means = [(sum(a) - sum(b)) / len(a) for a, b in zip(own, ref, strict=True)]
    total, _, _ = run(preference, batch, loss="ipo", beta=beta, normalise=True)
    gaps = [c - r for c, r in zip(means[::2], means[1::2], strict=True)]
    assert total == pytest.approx(sum((gap - 1 / (2 * beta)) ** 2 for gap in gaps) / 3, rel=1e-6)


def test_the_likelihood_term_is_the_mean_over_the_chosen_tokens():
    batch = pairs()
    plain, _, _ = run(preference, batch, loss="sigmoid", beta=0.4)
    total, metrics, _ = run(preference, batch, loss="sigmoid", beta=0.4, sft_coef=0.25)
    chosen = [value for part in by_sequence(batch, "log_probs")[::2] for value in part]
    assert metrics["actor/nll"] == pytest.approx(-sum(chosen) / len(chosen), rel=1e-6)
    assert total - plain == pytest.approx(0.25 * -sum(chosen) / len(chosen), rel=1e-6)


def test_without_a_reference_the_log_probs_stand_alone():
    batch = pairs()
    del batch.tokens["ref_log_probs"]
    own = [sum(values) for values in by_sequence(batch, "log_probs")]
    total, _, _ = run(preference, batch, loss="sigmoid", beta=0.4)
    expected = [-log_sigma(0.4 * (c - r)) for c, r in zip(own[::2], own[1::2], strict=True)]
    assert total == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_responses_that_are_equally_likely_cost_log_2_and_are_no_success():
    batch = pairs()
    batch.tokens["ref_log_probs"] = batch["log_probs"]
    total, metrics, _ = run(preference, batch, loss="sigmoid", beta=0.4)
    assert total == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["rewards/accuracy"] == 0.0


def in_parts(objective, batch, parts, **options):
    """Loss, metrics and gradient added up over micro-batches."""
    ends = batch.offsets.tolist()
    total, metrics, grad = 0.0, {}, torch.zeros(batch.num_tokens, dtype=torch.float64)
    for part in parts:
        value, noted, slope = run(objective, batch.select(part), **options)
        total += value
        metrics = {name: metrics.get(name, 0.0) + one for name, one in noted.items()}
        grad[torch.cat([torch.arange(ends[i], ends[i + 1]) for i in part])] = slope
    return total, metrics, grad


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3], [4, 5]], [[0, 1, 4, 5], [2, 3]], [[4, 5, 0, 1, 2, 3]]])
def test_no_split_into_micro_batches_changes_a_pair_loss(parts):
    batch = pairs()
    options = {"loss": "sigmoid", "beta": 0.4, "sft_coef": 0.3}
    whole, split = run(preference, batch, **options), in_parts(preference, batch, parts, **options)
    assert split[0] == pytest.approx(whole[0], rel=1e-9)
    assert split[1] == pytest.approx(whole[1], rel=1e-9)
    torch.testing.assert_close(split[2], whole[2])


def judged():
    desirable = torch.tensor([True, False, True])
    share, kind = torch.full((3,), 1 / 3), torch.tensor([0.5, 1.0, 0.5])
    return sequences([2, 1, 3], desirable=desirable, share=share, kind_share=kind, kl=torch.full((3,), 0.05))


def test_kto_is_the_mean_of_a_plain_loop():
    batch, beta, up, down = judged(), 0.6, 1.3, 0.7
    own, ref = (by_sequence(batch, name) for name in ("log_probs", "ref_log_probs"))
    ratios = [sum(a) - sum(b) for a, b in zip(own, ref, strict=True)]
    expected = [
        up * (1 - sigma(beta * (ratios[0] - 0.05))),
        down * (1 - sigma(beta * (0.05 - ratios[1]))),
        up * (1 - sigma(beta * (ratios[2] - 0.05))),
    ]
    total, metrics, grad = run(kto, batch, beta=beta, desirable_weight=up, undesirable_weight=down)
    assert total == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(beta * (ratios[0] + ratios[2]) / 2, rel=1e-6)
    assert metrics["rewards/rejected"] == pytest.approx(beta * ratios[1], rel=1e-6)
    assert metrics["rewards/margin"] == pytest.approx(metrics["rewards/chosen"] - metrics["rewards/rejected"])
    assert metrics["logps/rejected"] == pytest.approx(sum(own[1]), rel=1e-6)
    slope = sigma(beta * (ratios[0] - 0.05)) * (1 - sigma(beta * (ratios[0] - 0.05)))
    assert grad[1].item() == pytest.approx(-up * beta * slope / 3, rel=1e-6)
    assert grad[4].item() > 0  # the undesirable one becomes less likely
    split = in_parts(kto, batch, [[1], [0, 2]], beta=beta, desirable_weight=up, undesirable_weight=down)
    assert split[0] == pytest.approx(total, rel=1e-9)
    assert split[1] == pytest.approx(metrics, rel=1e-9)


def test_z_is_the_mean_log_ratio_and_never_below_0():
    batch = judged()
    own, ref = (by_sequence(batch, name) for name in ("log_probs", "ref_log_probs"))
    mean = sum(sum(a) - sum(b) for a, b in zip(own, ref, strict=True)) / 3
    forth = mismatch_kl(batch["log_probs"], batch["ref_log_probs"], batch)
    back = mismatch_kl(batch["ref_log_probs"], batch["log_probs"], batch)
    assert (forth, back) == (pytest.approx(max(mean, 0.0)), pytest.approx(max(-mean, 0.0)))
    assert min(forth, back) == 0.0 < max(forth, back)


def test_a_reward_model_reads_the_last_token_and_learns_by_bradley_terry():
    batch = pairs().with_columns(sequences={"margin": torch.tensor([0.5, 0.5, 0.0, 0.0, -1.0, -1.0])})
    scores = batch["log_probs"].clone().requires_grad_()
    last = [scores[end - 1].item() for end in batch.offsets.tolist()[1:]]
    expected, c = 0.0, 0.01
    for better, worse, margin in zip(last[::2], last[1::2], (0.5, 0.0, -1.0), strict=True):
        expected += math.log(1 + math.exp(worse - better + margin)) + c * (better + worse) ** 2
    total, metrics = reward_model({"scores": scores}, batch, center_coef=c)
    total.backward()
    assert total.item() == pytest.approx(expected / 3, rel=1e-6)
    assert metrics["rewards/margin"].item() == pytest.approx((sum(last[::2]) - sum(last[1::2])) / 3, rel=1e-6)
    assert sorted(scores.grad.nonzero().flatten().tolist()) == [end - 1 for end in batch.offsets.tolist()[1:]]


def test_objectives_are_found_by_name():
    call = LossCall("preference", {"loss": "hinge", "beta": 0.4})
    batch = pairs()
    found, _ = resolve_loss(call, PluginSet())({"log_probs": batch["log_probs"]}, batch)
    assert found.item() == pytest.approx(run(preference, batch, loss="hinge", beta=0.4)[0])


def test_wpo_weighs_the_loss_of_each_pair_without_gradient_and_leaves_the_likelihood():
    batch = pairs()
    squares = torch.linspace(0.2, 0.9, batch.num_tokens, dtype=torch.float64)

    def objective(outputs, batch, **options):
        return preference({**outputs, "sum_pi_squared": squares}, batch, loss="sigmoid", beta=0.7, **options)

    found, metrics, gradient = run(objective, batch, wpo=True, sft_coef=0.3)
    logps, squared = by_sequence(batch, "log_probs"), []
    for a, b in itertools.pairwise(batch.offsets.tolist()):
        squared.append(squares[a + 1 : b].tolist())
    aligned = [
        sum(lp - math.log(s) for lp, s in zip(ours, theirs, strict=True)) / len(ours)
        for ours, theirs in zip(logps, squared, strict=True)
    ]
    weights = [min(1.0, math.exp(aligned[i] + aligned[i + 1])) for i in (0, 2, 4)]
    assert metrics["rewards/pair_weight"] == pytest.approx(sum(weights) / 3)
    plain, expected = torch.zeros_like(gradient), 0.0
    for number, weight in enumerate(weights):  # each pair alone, whose share is then 1
        alone = with_shares(batch.select([2 * number, 2 * number + 1]))
        loss, _, part = run(preference, alone, loss="sigmoid", beta=0.7)
        start, end = batch.offsets[2 * number], batch.offsets[2 * number + 2]
        plain[start:end], expected = weight * part / 3, expected + weight * loss / 3
    likelihood = run(preference, batch, loss="sigmoid", beta=0.7, sft_coef=0.3)
    without = run(preference, batch, loss="sigmoid", beta=0.7)
    assert found == pytest.approx(expected + likelihood[0] - without[0])
    torch.testing.assert_close(gradient, plain + likelihood[2] - without[2])


def test_without_a_kl_kto_is_apo_zero_of_single_responses():
    kinds = torch.tensor([True, False, True])
    batch = sequences(
        [2, 1, 3],
        desirable=kinds,
        kl=torch.zeros(3, dtype=torch.float64),
        share=torch.full((3,), 1 / 3, dtype=torch.float64),
        kind_share=torch.tensor([0.5, 1.0, 0.5], dtype=torch.float64),
    )
    found, _, _ = run(kto, batch, beta=0.7)
    ours, theirs = by_sequence(batch, "log_probs"), by_sequence(batch, "ref_log_probs")
    d = [sum(a) - sum(b) for a, b in zip(ours, theirs, strict=True)]
    expected = [1 - sigma(0.7 * d[0]), sigma(0.7 * d[1]), 1 - sigma(0.7 * d[2])]
    assert found == pytest.approx(sum(expected) / 3)


def squared(chosen, rejected, beta, label_smoothing):
    return (1 - beta * (chosen - rejected)) ** 2 + label_smoothing


def test_a_loss_of_a_plugin_is_given_scores_and_what_it_reads():
    mine = PairLoss(load=squared, reads=frozenset({"label_smoothing"}))
    found, *_ = run(preference, pairs(), loss="squared", beta=0.7, label_smoothing=0.25, offered=mine)
    ours, theirs = (by_sequence(pairs(), name) for name in ("log_probs", "ref_log_probs"))
    d = [sum(a) - sum(b) for a, b in zip(ours, theirs, strict=True)]
    expected = sum((1 - 0.7 * (d[i] - d[i + 1])) ** 2 + 0.25 for i in (0, 2, 4)) / 3
    assert found == pytest.approx(expected)
    wrong = PairLoss(load=lambda chosen, rejected, beta: (chosen - rejected).sum())
    with pytest.raises(
        PluginError,
        match=r"dpo\.loss = 'mine' must return \[P\] = \[3\], one loss per pair; it returned \[\]",
    ):
        run(preference, pairs(), loss="mine", beta=0.7, offered=wrong)
