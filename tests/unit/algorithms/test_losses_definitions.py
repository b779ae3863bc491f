"""Every loss of the table against its definition: value and gradient, in float64, one token at a time.

The definitions below are loops over sequences and tokens in plain arithmetic; they share nothing with
the code. Weights are random, so each token counts for itself.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from engine_core import builtin
from engine_core.types import Batch
from engine_plugin_trainers import plugin as trainers

LOSSES = {**builtin.engine_losses(), **trainers.engine_losses()}
LENGTHS = [6, 3, 8, 4, 5, 9]
MASKS = [
    [0, 0, 1, 1, 1, 1],
    [0, 0, 1],  # one token
    [0, 1, 1, 0, 0, 1, 1, 1],  # two turns with an observation between
    [0, 0, 0, 0],  # nothing to learn
    [0, 1, 1, 1, 1],  # zero advantage
    [0, 0, 1, 1, 1, 1, 1, 1, 1],
]
ADVANTAGES = [1.3, -0.7, -1.1, 0.9, 0.0, 2.0]
HUGE = {2: 30.0, 5: -40.0}  # a log-ratio far over the bound of 20, at the second loss token of a sequence


def made(huge=False, per_token=False):
    """Log-probs of all tokens, and the batch."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    mask = torch.tensor([bit for row in MASKS for bit in row], dtype=torch.bool)
    new = -2.5 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.01
    old = new - 0.6 * torch.randn(total, generator=generator, dtype=torch.float64)
    old = torch.minimum(old, torch.tensor(-0.001, dtype=torch.float64))
    new, old = new * mask, old * mask
    advantages = torch.cat(
        [torch.full((n,), a, dtype=torch.float64) for n, a in zip(LENGTHS, ADVANTAGES, strict=True)]
    )
    if per_token:
        advantages = advantages + torch.randn(total, generator=generator, dtype=torch.float64)
    batch = Batch(
        token_ids=torch.arange(total),
        lengths=torch.tensor(LENGTHS),
        tokens={"loss_mask": mask, "advantages": advantages * mask, "old_log_probs": old},
    )
    if huge:
        for row, value in HUGE.items():
            place = mask.nonzero().flatten()[sum(map(sum, MASKS[:row])) + 1]
            (old if value > 0 else new)[place] -= abs(value)
    weights = torch.rand(total, generator=generator, dtype=torch.float64) * mask
    return new, batch.with_columns(tokens={"weights": weights})


# the definitions: f(log-probs of a sequence's loss tokens, old ones, advantages) -> losses


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def ratio(new, old):
    return torch.exp(torch.clamp(new - old, -20, 20))


def each(function):
    """A loss of one token at a time."""
    return lambda new, old, adv: [function(n, o, a) for n, o, a in zip(new, old, adv, strict=True)]


def clipped(r, a, low, high):
    return max(-r * a, -min(max(r, 1 - low), 1 + high) * a, key=lambda x: x.item())


def bounds(x, low, high):
    return min(max(x, low), high)


def ppo(n, o, a, low=0.2, high=0.2, c=None, delta=None):
    r = ratio(n, o)
    first = -(r if delta is None or r <= delta else number(delta)) * a
    second = -(r if 1 - low <= r <= 1 + high else number(bounds(r.item(), 1 - low, 1 + high))) * a
    loss = first if first >= second else second
    if c is not None and a < 0 and loss > -c * a:
        return number(-c * a.item())
    return loss


def cispo(n, o, a, low=1.0, high=4.0):
    return -bounds(ratio(n, o).item(), 1 - low, 1 + high) * a * n


def sapo(n, o, a):
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + torch.exp(-tau * (ratio(n, o) - 1))) * a


def dppo_tv(n, o, a):
    moved = math.exp(n.item()) - math.exp(o)
    if (a > 0 and moved > 0.2) or (a <= 0 and -moved > 0.2):
        return 0 * n
    return -a * min(ratio(n, o).item(), 20.0) * n


def dppo_kl(n, o, a):
    p, q = math.exp(o), math.exp(n.item())
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    if kl > 0.05 and ((a > 0 and q > p) or (a <= 0 and q < p)):
        return 0 * n
    return -a * min(ratio(n, o).item(), 20.0) * n


def gspo(new, old, adv):
    if not len(new):
        return []
    s = math.exp(bounds(sum((new - old).tolist()) / len(new), -20, 20))
    losses = []
    for n, a in zip(new, adv, strict=True):
        token = s * torch.exp(n - n.detach())
        keeps = -s * a >= -bounds(s, 1 - 3e-4, 1 + 4e-4) * a
        losses.append(-token * a if keeps else -bounds(s, 1 - 3e-4, 1 + 4e-4) * a)
    return losses


def gmpo(new, old, adv):
    if not len(new):
        return []
    xs = []
    for n, o, a in zip(new, old, adv, strict=True):
        x = n - o
        if a > 0 and x > 0.4:
            x = number(0.4)
        if a < 0 and x < -0.4:
            x = number(-0.4)
        xs.append(x if a != 0 else 0 * x)
    mean = torch.exp(torch.clamp(sum(xs) / len(xs), -20, 20))
    return [-a * mean for a in adv]


def vespo(new, old, adv):
    w = math.exp(bounds(sum((new - old).tolist()), -20, 20))
    losses = []
    for n, a in zip(new, adv, strict=True):
        k, decay = (2.0, 3.0) if a > 0 else (3.0, 2.0)
        losses.append(-(w**k) * math.exp(decay * (1 - w)) * a * n)
    return losses


DEFINITIONS = {
    "ppo_clip": each(ppo),
    "reinforce": each(lambda n, o, a: -a * n),
    "cispo": each(cispo),
    "sapo": each(sapo),
    "dppo_tv": each(dppo_tv),
    "dppo_kl": each(dppo_kl),
    "dro": each(lambda n, o, a: -(a * n - 0.1 / 2 * (n - o) ** 2)),
    "gspo": gspo,
    "luspo": gspo,
    "gmpo": gmpo,
    "vespo": vespo,
}


def ours(name, new, batch, **options):
    """The weighted sum and its gradient."""
    leaf = new.clone().requires_grad_()
    losses, metrics = LOSSES[name].resolve()({"log_probs": leaf}, batch, **options)
    total = (batch["weights"] * torch.where(batch["loss_mask"], losses, torch.zeros_like(losses))).sum()
    total.backward()
    assert all(values.isfinite().all() and len(values) == batch.num_tokens for values in metrics.values())
    assert not any(values.requires_grad for values in metrics.values())
    return total.item(), leaf.grad * batch["loss_mask"]


def defined(definition, new, batch):
    leaf = new.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    offsets = batch.offsets.tolist()
    for start, end in itertools.pairwise(offsets):
        keep = [t for t in range(start, end) if batch["loss_mask"][t]]
        losses = definition(leaf[keep], batch["old_log_probs"][keep], batch["advantages"][keep])
        for t, loss in zip(keep, losses, strict=True):
            total = total + batch["weights"][t] * loss
    total.backward()
    return total.item(), leaf.grad


def test_every_loss_of_the_table_is_defined_here():
    assert set(DEFINITIONS) == set(LOSSES)


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_the_definition(name, huge):
    new, batch = made(huge)
    value, gradient = ours(name, new, batch)
    expected, slope = defined(DEFINITIONS[name], new, batch)
    assert value == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_ratio": 0.1},
        {"clip_ratio": 0.1, "clip_ratio_high": 0.5},
        {"clip_ratio_low": 0.3, "clip_ratio_high": 0.0},
        {"clip_ratio_c": 1.5},
        {"delta": 1.4},
        {"delta": 1.05},
    ],
)
@pytest.mark.parametrize("per_token", [False, True])
def test_every_bound_of_ppo_clip_is_its_definition(options, per_token):
    both = options.get("clip_ratio", 0.2)
    low, high = options.get("clip_ratio_low", both), options.get("clip_ratio_high", both)
    definition = each(
        lambda n, o, a: ppo(n, o, a, low, high, options.get("clip_ratio_c"), options.get("delta"))
    )
    new, batch = made(huge=True, per_token=per_token)
    value, gradient = ours("ppo_clip", new, batch, **options)
    expected, slope = defined(definition, new, batch)
    assert value == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "parts", [[[0], [1], [2], [3], [4], [5]], [[5, 1], [3], [0, 4, 2]], [[5, 4, 3, 2, 1, 0]]]
)
def test_the_sum_does_not_depend_on_the_split_into_sequences_or_their_order(name, parts):
    new, batch = made(per_token=True)
    value, gradient = ours(name, new, batch)
    total = 0.0
    for rows in parts:
        part = batch.select(rows)
        found, slope = ours(name, new[part.token_ids], part)
        total += found
        torch.testing.assert_close(slope, gradient[part.token_ids], rtol=1e-10, atol=1e-12)
    assert total == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"vespo"}))
def test_a_policy_that_has_not_moved_gives_the_gradient_of_reinforce(name):
    new, batch = made()
    del batch.tokens["old_log_probs"]
    _, gradient = ours(name, new, batch)
    weights = batch["weights"]
    if name == "gmpo":  # the gradient of a mean: every token has its sequence's mean weight
        mean = batch.sum_by_sequence(weights) / batch.sum_by_sequence(batch["loss_mask"].double()).clamp(
            min=1
        )
        weights = batch.to_tokens(mean) * batch["loss_mask"]
    torch.testing.assert_close(gradient, -weights * batch["advantages"], rtol=1e-10, atol=1e-12)


def test_vespo_gives_the_gradient_of_reinforce_where_the_weight_is_one():
    new, batch = made()
    batch.tokens["old_log_probs"] = new
    _, gradient = ours("vespo", new, batch)
    torch.testing.assert_close(gradient, -batch["weights"] * batch["advantages"], rtol=1e-10, atol=1e-12)
