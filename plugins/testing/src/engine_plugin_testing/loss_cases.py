"""Contracts of a policy loss: its values, the direction of its gradient, and that tokens do not depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_plugin_testing.algorithm_bench import PROMPT, RESPONSE
from engine_plugin_testing.contracts import close, contract

if TYPE_CHECKING:
    from torch import Tensor

    from engine_plugin_testing.algorithm_bench import LossBench

TOLERANCE = 1e-5
SIZE = PROMPT + RESPONSE


def _tokens(count: int = 4 * RESPONSE) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, old log-probs and advantages [N] of random tokens."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -0.2 - torch.rand(count, generator=generator)
    old = log_probs + 0.3 * torch.randn(count, generator=generator)
    return log_probs, old, torch.randn(count, generator=generator)


@contract(catches=("a loss of half the size",))
def values_are_right(bench: LossBench) -> None:
    """The token, or the tokens of a response, of each example have the losses that the example gives."""
    for (log_prob, old, advantage), expected in bench.examples:
        values = [torch.as_tensor(value).float() for value in (log_prob, old, advantage, expected)]
        assert all(value.shape in ((), (RESPONSE,)) for value in values), (
            f"An example has {[value.numel() for value in values]} values; expected one each, or a list of "
            f"{RESPONSE}, the tokens of a response."
        )
        log_probs, before, advantages, losses = (value.expand(RESPONSE) for value in values)
        outputs, batch = bench.batch(log_probs, before, advantages)
        found = bench.losses(outputs, batch)[0][batch["loss_mask"]].detach()
        what = f"Loss with log-prob {log_prob}, old log-prob {old}, advantage {advantage}"
        close(found, losses, TOLERANCE, what)


@contract(catches=("advantages with the wrong sign",))
def the_gradient_follows_the_advantage(bench: LossBench) -> None:
    """A gradient step makes tokens with a positive advantage more likely, and all others less likely.

    The log-probs are those of the old policy.
    """
    log_probs, _, advantages = _tokens()
    sign = advantages.sign()
    for whole in (sign, -sign, torch.ones_like(sign), -torch.ones_like(sign)):
        per_response = whole.reshape(-1, RESPONSE)[:, :1].expand(-1, RESPONSE).reshape(-1)
        outputs, batch = bench.batch(log_probs, log_probs, per_response)
        losses, _ = bench.losses(outputs, batch)
        (gradient,) = torch.autograd.grad((losses * batch["weights"]).sum(), outputs["log_probs"])
        found = -gradient[batch["loss_mask"]] * per_response
        follows = bool((found >= 0).all()) and bool((found > 0).any())
        assert follows, (
            f"Advantages {per_response.tolist()} have the gradient {gradient[batch['loss_mask']].tolist()}: "
            "its sign must be opposite."
        )


@contract(catches=("a mean over the micro-batch",))
def a_micro_batch_changes_no_loss(bench: LossBench) -> None:
    """A sequence's tokens have the same loss alone and in a micro-batch with other sequences."""
    outputs, batch = bench.batch(*_tokens())
    losses, _ = bench.losses(outputs, batch)
    for number in range(len(batch)):
        alone = {name: value[SIZE * number : SIZE * (number + 1)] for name, value in outputs.items()}
        found, _ = bench.losses(alone, batch.select([number]))
        mask = batch.select([number])["loss_mask"]
        expected = losses[SIZE * number : SIZE * (number + 1)]
        close(found[mask].detach(), expected[mask].detach(), TOLERANCE, f"Losses of sequence {number} alone")


@contract(catches=("an overflow of the ratio",))
def a_policy_that_moved_far_is_finite(bench: LossBench) -> None:
    """Losses and gradients are finite even at log-ratios of 100 and -100."""
    old = torch.full((2 * RESPONSE,), -105.0)
    for log_probs, before in ((old + 100, old), (old, old + 100)):
        for advantage in (1.0, -1.0):
            outputs, batch = bench.batch(log_probs, before, torch.full_like(old, advantage))
            losses, _ = bench.losses(outputs, batch)
            (gradient,) = torch.autograd.grad(losses.sum(), outputs["log_probs"])
            finite = bool(losses.isfinite().all()) and bool(gradient.isfinite().all())
            assert finite, (
                f"A log-ratio of {float(log_probs[0] - before[0]):g} with advantage {advantage:g} gives losses "
                f"{losses.tolist()} and gradients {gradient.tolist()}. Clamp the log-ratio."
            )


@contract(catches=("the gradient through a metric",))
def metrics_are_without_gradient(bench: LossBench) -> None:
    """Metrics are tensors of shape [T] without a gradient.

    They are finite where a token is learned.
    """
    outputs, batch = bench.batch(*_tokens())
    _, metrics = bench.losses(outputs, batch)
    for name, value in metrics.items():
        assert value.shape == outputs["log_probs"].shape, (
            f"Metric '{name}' has the shape {list(value.shape)}."
        )
        assert not value.requires_grad, (
            f"Metric '{name}' has a gradient: it keeps the graph alive. Use .detach()."
        )
        assert bool(value[batch["loss_mask"]].isfinite().all()), f"Metric '{name}' is not finite."


@contract(catches=("the advantages changed in place",))
def inputs_are_left_alone(bench: LossBench) -> None:
    """The loss changes neither outputs nor columns.

    Called again it gives the same losses.
    """
    outputs, batch = bench.batch(*_tokens())
    before = {name: value.clone() for name, value in {**batch.tokens, **outputs}.items()}
    first, _ = bench.losses(outputs, batch)
    for name, value in {**batch.tokens, **outputs}.items():
        assert torch.equal(value, before[name]), f"It changes '{name}'."
    second, _ = bench.losses(outputs, batch)
    close(second.detach(), first.detach(), 0.0, "Losses, called again")
