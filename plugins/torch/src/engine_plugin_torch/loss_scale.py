"""The scale of the loss in fp16, whose smallest positive number is 6e-8: smaller gradients would become 0.

The loss is multiplied by a factor before the backward pass, and gradients are divided by it before their norm is taken.
The factor is the initial one times a power of two: if the initial one is a power of two, scaling rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine_plugin_torch.sharded import here

GROWTH_STEPS = 2000
MIN_FACTOR = 1.0  # gradients that overflow without a scale are those of a broken step


class LossScale:
    """A factor that halves when gradients overflow and doubles after ``GROWTH_STEPS`` steps without overflow.

    Overflow is detected in the norm over all ranks, so all ranks change the factor together.

    Args:
        factor: the initial factor; None where nothing is scaled, because gradients are in another type.

    Attributes:
        active: whether the loss is scaled.
        good_steps: steps since the factor changed.
        loss_is_finite: whether all losses since the last step were finite; if one was not, no scale helps.
    """

    def __init__(self, factor: float | None = None) -> None:
        self.active = factor is not None
        self.factor = 1.0 if factor is None else factor
        self.good_steps = 0
        self.loss_is_finite = True

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss ``[]``, or losses ``[B]``, times the factor."""
        return loss * self.factor if self.active else loss

    def see(self, loss: float) -> None:
        """Note the value of a loss, over all ranks, that gradients were computed of."""
        self.loss_is_finite &= math.isfinite(loss)

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients ``[D0, ...]``, of this rank or sharded, by the factor, in place."""
        if self.active and (parts := [here(gradient) for gradient in gradients]):
            torch._foreach_div_(parts, self.factor)

    def multiply(self, gradients: Iterable[Tensor], factor: float) -> None:
        """Multiply gradients ``[D0, ...]``, of this rank or sharded, in place; the scale of the loss stays."""
        if parts := [here(gradient) for gradient in gradients]:
            torch._foreach_mul_(parts, factor)

    def stepped(self, skipped: bool) -> bool:
        """Update the factor after one optimizer step.

        Args:
            skipped: the gradients were not finite.

        Returns:
            Whether the factor was lowered. If a loss was not finite, or the factor is at most 1 already, it stays.
        """
        finite, self.loss_is_finite = self.loss_is_finite, True
        if not self.active:
            return False
        if not skipped:
            self.good_steps += 1
            if self.good_steps >= GROWTH_STEPS:
                self.factor, self.good_steps = self.factor * 2, 0
            return False
        self.good_steps = 0
        if not finite or self.factor <= MIN_FACTOR:
            return False
        self.factor /= 2
        return True

    def state(self) -> dict[str, Any]:
        """Return the plain values that a checkpoint holds: none where nothing is scaled."""
        if not self.active:
            return {}
        return {"loss_scale": {"factor": self.factor, "good_steps": self.good_steps}}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the values of ``state``; without them, as of a run in another type, the initial factor stays."""
        if self.active and "loss_scale" in saved:
            self.factor = float(saved["loss_scale"]["factor"])
            self.good_steps = int(saved["loss_scale"]["good_steps"])
