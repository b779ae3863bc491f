"""Option tables of the core's algorithms (no torch here: read by ``engine validate``)."""

from __future__ import annotations

from pydantic import Field

from engine_core.specs import Options


class PPOClipOptions(Options):
    """``[algorithm.ppo_clip]``"""

    clip_ratio_low: float = Field(0.2, ge=0)
    """The probability ratio is held above 1 - this."""
    clip_ratio_high: float = Field(0.2, ge=0)
    """The probability ratio is held below 1 + this; larger than `clip_ratio_low` is DAPO's clip-higher."""
    clip_ratio_c: float | None = Field(None, gt=1)
    """Dual clip: with a negative advantage the loss is at most this times -advantage (https://arxiv.org/abs/1912.09729)."""
