"""Option tables of the trainers other than ``rl``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine_core.specs import Options


class AsyncOptions(Options):
    """``[async]``"""

    max_staleness: int = Field(1, ge=0)
    """How many policy versions old a token may be when it is learned from. 0: nothing is sampled ahead, and the run is that of ``rl``; 1: one step off."""
    weight_updates: Literal["auto", "keep", "abort", "drain"] = "auto"
    """What becomes of responses that are being sampled when the weights change. ``keep``: they go on with the new weights; ``abort``: they are stopped, and go on from where they were; ``drain``: the update waits for them. ``auto``: ``keep`` where the sampler can pause, else ``drain``."""
    order: Literal["ready", "admitted"] = "ready"
    """Which groups a step takes: those that are ready first, as long as no other becomes too old; or in the order of the data, whatever takes long."""

    @property
    def changes_weights_under_way(self) -> bool:
        return self.max_staleness > 0 and self.weight_updates != "drain"


class OfflineOptions(Options):
    """``[offline]``"""

    unequal_groups: bool = False
    """Accept groups of different sizes, as some stages make them; else they are refused as a sign of a damaged file."""


class SFTOptions(Options):
    """``[sft]``"""

    max_tokens: int = Field(4096, gt=0)
    """Longest sequence; a longer one follows `data.over_long`."""
    train_on_prompt: bool = False
    """Learn the prompt's tokens too."""


class DistillOptions(Options):
    """``[distill]``"""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """What is made small: KL(student, teacher), KL(teacher, student), or the generalised Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649)."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """``jsd``: the teacher's share of the mixture. Near 0 it is about this times the forward KL, near 1 about (1 - this) times the reverse KL."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """K: the teacher's likeliest tokens a position that are compared one by one; all others are compared as one sum. 0: the whole vocabulary. Default: 128, or the whole vocabulary where that is smaller."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Softmax temperature of both distributions that are compared; default: `rollout.temperature`."""
    data_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the steps that learn from the responses of the data instead of the student's own; with 1 only evaluations sample."""
    max_tokens: int = Field(4096, gt=0)
    """Longest sequence of a step from the data; a longer one follows `data.over_long`."""
    max_values: int = Field(67_108_864, gt=0)
    """Most log-probs of the teacher that exist at one time (tokens times K; 12 bytes each). A step is done in parts of so many; a longer sequence is a part of its own."""


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
