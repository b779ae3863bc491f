"""Option tables of the policy losses (no torch here: read by ``engine validate``)."""

from __future__ import annotations

from pydantic import Field

from engine_core.specs import Options


class PPOClipOptions(Options):
    """``[algorithm.ppo_clip]``"""

    clip_ratio: float = Field(0.2, ge=0)
    """The probability ratio is held within 1 - this and 1 + this, where the next two are not set."""
    clip_ratio_low: float | None = Field(None, ge=0)
    """The ratio is held above 1 - this; default: `clip_ratio`."""
    clip_ratio_high: float | None = Field(None, ge=0)
    """The ratio is held below 1 + this; default: `clip_ratio`. Larger than `clip_ratio_low` is DAPO's clip-higher."""
    clip_ratio_c: float | None = Field(None, gt=1)
    """Dual clip: with a negative advantage the loss is at most this times -advantage (https://arxiv.org/abs/1912.09729)."""
    delta: float | None = Field(None, gt=1)
    """Two-sided clip: the ratio of the unclipped term is at most this (https://arxiv.org/abs/2505.07291)."""


class GSPOOptions(Options):
    """``[algorithm.gspo]`` and ``[algorithm.luspo]``"""

    clip_ratio_low: float = Field(3e-4, ge=0)
    """The ratio of a sequence is held above 1 - this; far below a token's, since it is a geometric mean."""
    clip_ratio_high: float = Field(4e-4, ge=0)
    """The ratio of a sequence is held below 1 + this."""


class GMPOOptions(Options):
    """``[algorithm.gmpo]``"""

    clip_ratio_low: float = Field(0.4, ge=0)
    """The log of a token's ratio is held above minus this."""
    clip_ratio_high: float = Field(0.4, ge=0)
    """The log of a token's ratio is held below this."""


class CISPOOptions(Options):
    """``[algorithm.cispo]``"""

    clip_ratio_low: float = Field(1.0, ge=0)
    """The weight of a token is held above 1 - this; 1 is no bound."""
    clip_ratio_high: float = Field(4.0, ge=0)
    """The weight of a token is held below 1 + this."""


class SAPOOptions(Options):
    """``[algorithm.sapo]``"""

    tau_pos: float = Field(1.0, gt=0)
    """Temperature of the gate with a positive advantage; higher fades faster."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature of the gate with another advantage."""


class DPPOTVOptions(Options):
    """``[algorithm.dppo_tv]``"""

    threshold_low: float = Field(0.2, ge=0)
    """A token that became less likely by more than this is pushed down no more."""
    threshold_high: float = Field(0.2, ge=0)
    """A token that became more likely by more than this is pushed up no more."""
    cap: float = Field(20.0, gt=0)
    """Upper bound of the ratio that weighs a token."""


class DPPOKLOptions(Options):
    """``[algorithm.dppo_kl]``"""

    threshold_low: float = Field(0.05, ge=0)
    """A token that became less likely, by a KL over this, is pushed down no more."""
    threshold_high: float = Field(0.05, ge=0)
    """A token that became more likely, by a KL over this, is pushed up no more."""
    cap: float = Field(20.0, gt=0)
    """Upper bound of the ratio that weighs a token."""


class DROOptions(Options):
    """``[algorithm.dro]``"""

    beta: float = Field(0.1, ge=0)
    """Weight of the squared log-ratio."""


class VESPOOptions(Options):
    """``[algorithm.vespo]``"""

    k_pos: float = Field(2.0, ge=0)
    """Power of a sequence's weight, with a positive advantage."""
    lambda_pos: float = Field(3.0, gt=0)
    """Decay in a sequence's weight, with a positive advantage."""
    k_neg: float = Field(3.0, ge=0)
    """Power of a sequence's weight, with another advantage."""
    lambda_neg: float = Field(2.0, gt=0)
    """Decay in a sequence's weight, with another advantage."""
