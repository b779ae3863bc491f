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


class ReplayCacheOptions(Options):
    """``[stage.replay_cache]``"""

    share: float = Field(0.5, ge=0, lt=1)
    """Share of the batch's groups that come from the cache; they are added to the new ones: with 0.5 as many again."""
    size: int = Field(256, gt=0)
    """Groups that are kept; the oldest leave first."""
    max_age: int = Field(8, gt=0)
    """A group leaves when its oldest token is more policy versions (weight updates) behind the sampler than this."""
    seed: int = Field(0, ge=0)
    """Seed of the draw; the step is added to it."""
