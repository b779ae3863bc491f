"""Loss scaling, which keeps small gradients from vanishing in fp16 (https://arxiv.org/abs/1710.03740)."""

from __future__ import annotations

GROWTH_STEPS = 2000


class LossScale:
    """A factor that halves when gradients overflow and doubles after ``GROWTH_STEPS`` steps without overflow.

    Overflow is detected in the norm over all ranks, so all ranks change the factor together.

    Args:
        factor: the initial factor.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.good_steps = 0

    def stepped(self, skipped: bool) -> None:
        """Update the factor after one optimizer step, which was ``skipped`` on overflow."""
        if skipped:
            self.factor, self.good_steps = self.factor / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.factor, self.good_steps = self.factor * 2, 0
