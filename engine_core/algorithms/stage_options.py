"""Option tables of the stages (no torch here: read by ``engine validate``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine_core.specs import Options, RefillOptions


class DynamicSamplingOptions(RefillOptions):
    """``[stage.dynamic_sampling]``"""

    reward: str | None = None
    """A group is dropped where this reward is equal in all its rollouts; default: the sum of all rewards."""


class PFPPOOptions(Options):
    """``[stage.pf_ppo_resample]``"""

    method: Literal["pow", "max_min", "max_random"] = "pow"
    """``pow``: probability ∝ |R|^`power`; ``max_min``: only the highest and lowest R; ``max_random``: 0.4 for the highest R, 0.1 for others."""
    power: float = Field(2.0, ge=0)
    """Exponent of ``pow``."""
    seed: int = Field(0, ge=0)
    """Seed of the draw; the step is added to it."""
