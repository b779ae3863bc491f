"""The default optimizer and learning-rate schedules."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from engine_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from engine_core.config import OptimConfig

log = logging.getLogger("engine")

FUSED_DEVICES = frozenset({"cuda", "cpu", "mps", "xpu"})


def build_optimizer(
    module: nn.Module, config: OptimConfig, total_steps: int, role: str = "actor"
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Build AdamW, with decoupled weight decay on matrices only, and its schedule.

    Args:
        module: the model; its parameters that require gradients are optimized.
        config: the role's ``optim`` table.
        total_steps: optimizer steps of the run; 0 where the number is not known.
        role: the role's name, for messages.

    Raises:
        ConfigError: the schedule needs the number of steps, which is not known.
    """
    if config.lr == 0:
        log.warning("%s.optim.lr is 0: the weights do not change until [schedule] raises it.", role)
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused or None,
    )
    return optimizer, build_schedule(optimizer, config, total_steps, role)


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int, role: str = "actor"
) -> LambdaLR:
    """Build the schedule: linear warm-up (step n uses n / warmup_steps of the peak), then the chosen shape.

    Raises:
        ConfigError: the shape needs the number of steps, which is not known.
    """
    length = config.decay_steps or total_steps
    if config.schedule != "constant" and length <= 0:
        raise ConfigError(
            f"{role}.optim.schedule is '{config.schedule}', but the number of steps is not known. "
            f"Set {role}.optim.decay_steps or run.steps."
        )

    def factor(step: int) -> float:
        """Return the share of the peak rate at a step, counted from 0."""
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * _shape(step)

    def _shape(step: int) -> float:
        if config.schedule == "constant":
            return 1.0
        done = (step - config.warmup_steps) / max(1, length - config.warmup_steps)
        left = 1 - min(1.0, done)
        return left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))

    return LambdaLR(optimizer, factor)


def optimizer_problem(built: Any) -> str:
    """Return what is wrong with a result of ``engine_build_optimizer``; "" if nothing is."""
    pair = isinstance(built, (tuple, list)) and len(built) == 2
    if pair and hasattr(built[0], "param_groups") and (built[1] is None or hasattr(built[1], "step")):
        return ""
    found = type(built).__name__
    if isinstance(built, (tuple, list)):
        found += f" of {len(built)} ({', '.join(type(part).__name__ for part in built)})"
    return (
        f"returned {found}; expected (optimizer, lr_scheduler), or (optimizer, None) for rates that stay. "
        "None leaves it to the next plugin."
    )


def check_groups(module: nn.Module, optimizer: torch.optim.Optimizer, role: str, lr: float) -> None:
    """Refuse an optimizer that lacks trainable parameters, or whose highest rate is not ``optim.lr``; log its groups.

    The gradient of a parameter in no group would never be cleared and would count in the norm for clipping. A schedule or
    a resume that sets ``optim.lr`` sets the highest rate, and metrics show that rate.

    Args:
        module: the model.
        optimizer: the optimizer that a plugin built.
        role: name of the role.
        lr: ``optim.lr`` of the role.

    Raises:
        PluginError: parameters are in no group, or the highest rate is another.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trainable = {name: id(p) for name, p in module.named_parameters() if p.requires_grad}
    left_out = [name for name, parameter in trainable.items() if parameter not in held]
    if left_out:
        shown = ", ".join(f"'{name}'" for name in left_out[:3]) + (
            f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        )
        raise PluginError(
            f"The optimizer ({type(optimizer).__name__}) of the role '{role}' has {len(left_out)} of its "
            f"{len(trainable)} trainable parameters in no group: {shown}. Put them in a group, or set "
            "requires_grad to False."
        )
    highest = max(float(group.get("initial_lr", group.get("lr", lr))) for group in optimizer.param_groups)
    if not math.isclose(highest, lr, rel_tol=1e-6):
        raise PluginError(
            f"The highest learning rate of the optimizer's groups is {highest:g}, and {role}.optim.lr is {lr:g}. Schedules and "
            f"metrics use this key: set it to the highest rate, and give other groups a share of it."
        )
    for number, group in enumerate(optimizer.param_groups):
        rate, count = group.get("initial_lr", group.get("lr", lr)), sum(p.numel() for p in group["params"])
        decay = group.get("weight_decay", 0.0)
        log.info(
            "%s: group %d of the optimizer: lr %g, weight decay %g, %d parameters.",
            role,
            number,
            rate,
            decay,
            count,
        )


def peak_rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    """Return the peak rate of each group: the base rates of a scheduler, else the initial rates."""
    groups = optimizer.param_groups
    bases = getattr(scheduler, "base_lrs", None) or [group.get("initial_lr", group["lr"]) for group in groups]
    return [float(base) for base in bases]


def set_peak_lr(
    optimizer: torch.optim.Optimizer, scheduler: Any, lr: float, rates: Sequence[float] | None = None
) -> None:
    """Replace the peak rate; the schedule's factor at this step stays, and each group's share of the largest rate.

    The optimizer keeps the shares as ``lr_shares``: rates of 0 have none.

    Args:
        optimizer: the optimizer whose groups are changed.
        scheduler: its schedule, whose base rates are changed, or None.
        lr: the new peak of the group with the largest rate.
        rates: a rate of each group, of which the shares are taken; default: ``peak_rates``.
    """
    groups, bases = optimizer.param_groups, peak_rates(optimizer, scheduler)
    for known in (bases, rates or ()):
        if largest := max(known, default=0.0):
            optimizer.lr_shares = [rate / largest for rate in known]  # type: ignore[attr-defined]
    # divided first: lr * rate / rate is not always lr, and a resumed run must have the rate of an uninterrupted one
    peaks = [lr * share for share in getattr(optimizer, "lr_shares", [1.0] * len(groups))]
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):  # those that SequentialLR contains
        if hasattr(each, "base_lrs"):
            each.base_lrs = peaks
    highest = bases.index(max(bases))  # its factor is that of a group whose rate was 0
    factor = groups[highest]["lr"] / bases[highest] if bases[highest] else 1.0
    # the lr_lambdas of MultiplicativeLR are factors of one step
    factors = scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else None
    for index, group in enumerate(groups):
        if factors is not None:
            group["lr"] = peaks[index] * factors[index](scheduler.last_epoch)
        else:
            group["lr"] = (
                group["lr"] * (peaks[index] / bases[index]) if bases[index] else peaks[index] * factor
            )
        group["initial_lr"] = peaks[index]
