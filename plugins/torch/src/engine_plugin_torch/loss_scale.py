"""Scaling of the loss, so that small gradients do not vanish in fp16 (https://arxiv.org/abs/1710.03740)."""

from __future__ import annotations

GROWTH_STEPS = 2000


class LossScale:
    """A factor that halves when gradients overflow and doubles after many steps in which they did not.

    Overflow is seen in the norm over all ranks, so all ranks change it together.

    Args:
        factor: at first.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.good_steps = 0

    def stepped(self, skipped: bool) -> None:
        """Follow one optimizer step."""
        if skipped:
            self.factor, self.good_steps = self.factor / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.factor, self.good_steps = self.factor * 2, 0
