"""Schedules and parameter groups of the default optimizer."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR, SequentialLR

from engine_core.config import OptimConfig
from engine_core.errors import ConfigError
from engine_plugin_torch.optimizers import build_optimizer, build_schedule, check_groups, set_peak_lr


def rates(steps, total=0, **config):
    """The learning rates that the first steps use."""
    optimizer, scheduler = build_optimizer(nn.Linear(2, 2), OptimConfig(lr=1.0, **config), total)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def test_constant_holds_the_peak_after_the_warm_up():
    assert rates(5, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates(2) == [1, 1]


def test_linear_falls_to_the_minimum_over_the_run():
    assert rates(6, total=6, schedule="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx(
        [0.5, 1, 1, 0.8, 0.6, 0.4]
    )
    assert rates(5, total=100, schedule="linear", decay_steps=2) == pytest.approx([1, 0.5, 0, 0, 0])


def test_cosine_is_half_way_at_half_time():
    assert rates(5, total=4, schedule="cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_a_falling_schedule_needs_a_length():
    with pytest.raises(
        ConfigError, match=r"critic.optim.schedule is 'linear'.* Set critic.optim.decay_steps or run.steps"
    ):
        build_optimizer(nn.Linear(2, 2), OptimConfig(schedule="linear"), 0, "critic")


def test_matrices_decay_and_vectors_do_not_and_frozen_ones_are_left_out():
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    module[2].weight.requires_grad_(False)
    optimizer, _ = build_optimizer(module, OptimConfig(weight_decay=0.1), 0)
    found = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    expected = {
        module[0].weight: 0.1,
        module[0].bias: 0.0,
        module[1].weight: 0.0,
        module[1].bias: 0.0,
        module[2].bias: 0.0,
    }
    assert found == {id(parameter): decay for parameter, decay in expected.items()}


def test_a_new_peak_keeps_the_place_in_the_schedule():
    optimizer, scheduler = build_optimizer(nn.Linear(2, 2), OptimConfig(lr=1.0, schedule="linear"), 4)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    set_peak_lr(optimizer, scheduler, 0.1)
    used = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    scheduler.step()
    used += [group["lr"] for group in optimizer.param_groups]
    assert used == pytest.approx([0.05, 0.05, 0.025, 0.025])


@pytest.mark.parametrize("peak", [1e-7, 3e-5, 5e-5, 1e-4, 2e-4, 5e-2])  # peak * peak / peak is another number
def test_the_same_peak_again_changes_no_bit_of_the_rate(peak):
    config = OptimConfig(lr=peak, schedule="cosine", warmup_steps=3)
    optimizer, scheduler = build_optimizer(nn.Linear(2, 2), config, 9)
    for _ in range(8):
        before = [group["lr"] for group in optimizer.param_groups]
        set_peak_lr(optimizer, scheduler, peak)
        assert [group["lr"] for group in optimizer.param_groups] == before
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("build", "factors"),
    [
        (lambda o: MultiplicativeLR(o, lambda step: 0.9), [1, 0.9, 0.81, 0.729]),
        (
            lambda o: SequentialLR(
                o, [LambdaLR(o, lambda step: 1.0), LambdaLR(o, lambda step: 0.5**step)], [2]
            ),
            [1, 1, 1, 0.5],
        ),
    ],
    ids=["factors of one step", "in turn"],
)
def test_a_new_peak_scales_the_rates_of_a_plugins_schedule(build, factors):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler, used = build(optimizer), []
    for peak in (1.0, 1.0, 0.1, 0.1):
        set_peak_lr(optimizer, scheduler, peak)
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [factor * peak for factor, peak in zip(factors, (1, 1, 0.1, 0.1), strict=True)]
    assert used == pytest.approx(expected)


def test_a_new_peak_without_a_schedule_is_the_rate():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
    set_peak_lr(optimizer, None, 0.1)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_new_peak_keeps_the_shares_of_groups_with_rates_of_their_own():
    slow, fast = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": slow.parameters(), "lr": 0.25}, {"params": fast.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = build_schedule(optimizer, OptimConfig(lr=1.0, schedule="linear"), 4)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    set_peak_lr(optimizer, scheduler, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0125, 0.05])
    set_peak_lr(optimizer, scheduler, 0.0)
    set_peak_lr(optimizer, scheduler, 0.2)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0125, 0.05])


def test_a_new_peak_without_a_schedule_keeps_the_shares_too():
    slow, fast = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": slow.parameters(), "lr": 0.25}, {"params": fast.parameters()}], lr=0.5
    )
    for peak in (0.1, 0.0, 0.3):
        set_peak_lr(optimizer, None, peak)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([peak / 2, peak])


def test_a_group_whose_rate_was_0_gets_its_share_at_the_place_in_the_schedule():
    module = nn.Linear(2, 2)
    groups = [{"params": [module.weight]}, {"params": [module.bias], "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    set_peak_lr(optimizer, scheduler, 1.0, rates=[1.0, 0.1])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


def test_the_groups_of_an_optimizer_of_a_plugin_are_logged(caplog):
    module = nn.Linear(3, 2)
    groups = [{"params": [module.weight], "weight_decay": 0.1}, {"params": [module.bias], "lr": 0.01}]
    with caplog.at_level(logging.INFO, "engine"):
        check_groups(module, torch.optim.SGD(groups, lr=0.02), "actor", 0.02)
    assert "actor: group 0 of the optimizer: lr 0.02, weight decay 0.1, 6 parameters." in caplog.text
    assert "actor: group 1 of the optimizer: lr 0.01, weight decay 0, 2 parameters." in caplog.text
