"""Learning from tokens of several policies in one sequence, against closed forms.

The policy is a coin at each of three positions, ``p(1) = sigmoid(theta)``; versions 0, 1 and 2 of it sampled one
token each, version 3 learns. All eight responses are enumerated, so every expectation is exact.
"""

import itertools
from math import exp, log

import pytest
import torch

from engine_core.algorithms.correction import Correction, importance_weights, rollout_log_ratio
from engine_core.algorithms.losses import ppo_clip, reinforce
from engine_core.algorithms.objectives import policy, with_weights
from engine_core.types import Batch, Prompt, Rollout

THETAS = [-0.4, 0.3, 0.9]  # of versions 0, 1, 2
NOW = 1.4
SCORES = {bits: 1.0 + 2.0 * bits[0] - 3.0 * bits[1] * bits[2] for bits in itertools.product((0, 1), repeat=3)}
"""A reward that no sum over tokens gives."""


def log_prob(theta, bit):
    return -log(1 + exp(-theta)) if bit else -log(1 + exp(theta))


def sampled(bits, number):
    """The response as a sampler would give it whose weights changed after each token."""
    return Rollout(
        request_id=f"1:{number}:0",
        prompt=Prompt("p", [2], ""),
        token_ids=torch.tensor([2, *bits]),
        loss_mask=torch.tensor([False, True, True, True]),
        rollout_log_probs=torch.tensor(
            [0.0, *(log_prob(theta, bit) for theta, bit in zip(THETAS, bits, strict=True))],
            dtype=torch.float64,
        ),
        policy_versions=torch.tensor([0, 0, 1, 2], dtype=torch.int32),
        finish_reason="stop",
        group_id=number,
    )


def probability(bits):
    """Of sampling it, under the versions of its tokens."""
    return exp(sum(log_prob(theta, bit) for theta, bit in zip(THETAS, bits, strict=True)))


def of_policy(bits, theta):
    return exp(sum(log_prob(theta, bit) for bit in bits))


def gradient(bits, level, cap=1e9, loss=ppo_clip):
    """d loss / d theta at NOW of one response, through the objective of a worker."""
    batch = Batch.from_rollouts([sampled(bits, 0)])
    theta = torch.tensor(NOW, dtype=torch.float64, requires_grad=True)
    signs = torch.tensor([0.0, *(2.0 * bit - 1.0 for bit in bits)], dtype=torch.float64)
    log_probs = torch.nn.functional.logsigmoid(signs * theta) * batch["loss_mask"]
    batch = with_weights(
        batch.with_columns(
            tokens={
                "old_log_probs": log_probs.detach(),
                "advantages": torch.full((4,), SCORES[bits], dtype=torch.float64),
            }
        ),
        "token-mean",
    )
    total, _ = policy(
        {"log_probs": log_probs}, batch, token_loss=loss, correction=Correction(level=level, cap=cap)
    )
    (found,) = torch.autograd.grad(total, theta)
    return float(found) * 3  # the mean over three tokens as a sum


def score_function(bits, theta):
    """d log pi / d theta, by token."""
    p = 1 / (1 + exp(-theta))
    return [bit - p for bit in bits]


@pytest.mark.parametrize("cap", [2.0, 1.1])
def test_each_token_is_weighed_by_the_version_that_sampled_it(cap):
    for bits in SCORES:
        batch = Batch.from_rollouts([sampled(bits, 0)])
        now = torch.tensor([0.0, *(log_prob(NOW, bit) for bit in bits)], dtype=torch.float64)
        found = importance_weights(batch, rollout_log_ratio(batch, now), Correction(level="token", cap=cap))
        sigmoid = [1 / (1 + exp(-theta)) for theta in (*THETAS, NOW)]
        ratios = [
            (sigmoid[3] / p if bit else (1 - sigmoid[3]) / (1 - p))
            for p, bit in zip(sigmoid, bits, strict=False)
        ]
        assert found[1:].tolist() == pytest.approx([min(ratio, cap) for ratio in ratios], rel=1e-12)


def test_weights_of_sequences_give_the_gradient_of_the_present_policy():
    exact = -sum(of_policy(bits, NOW) * SCORES[bits] * sum(score_function(bits, NOW)) for bits in SCORES)
    mixed = sum(probability(bits) * gradient(bits, "sequence") for bits in SCORES)
    assert mixed == pytest.approx(exact, rel=1e-6)


def test_weights_of_tokens_correct_each_token_and_leave_those_before_and_after_it_as_they_were_sampled():
    exact = 0.0
    for bits in SCORES:
        for place, score in enumerate(score_function(bits, NOW)):
            thetas = [*THETAS]
            thetas[place] = NOW  # its own distribution is the present one, that of the others is not
            chance = exp(sum(log_prob(theta, bit) for theta, bit in zip(thetas, bits, strict=True)))
            exact -= chance * SCORES[bits] * score
    mixed = sum(probability(bits) * gradient(bits, "token") for bits in SCORES)
    assert mixed == pytest.approx(exact, rel=1e-6)


def test_without_weights_the_gradient_is_another():
    exact = -sum(of_policy(bits, NOW) * SCORES[bits] * sum(score_function(bits, NOW)) for bits in SCORES)
    stale = sum(probability(bits) * gradient(bits, "off") for bits in SCORES)
    weighed = sum(probability(bits) * gradient(bits, "sequence") for bits in SCORES)
    assert abs(stale - exact) > 0.1 > abs(weighed - exact)


def test_the_clip_is_about_the_step_and_not_about_the_age():
    """Decoupled: old tokens are not clipped for having been sampled by another policy."""
    for bits in SCORES:
        assert gradient(bits, "token") == pytest.approx(gradient(bits, "token", loss=reinforce), rel=1e-9)
