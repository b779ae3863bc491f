"""Option tables of the advantage estimators (no torch here: read by ``engine validate``)."""

from __future__ import annotations

from pydantic import Field

from engine_core.specs import Options


class GRPOOptions(Options):
    """``[algorithm.grpo]``"""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation; off is Dr.GRPO's advantage."""
    epsilon: float = Field(1e-6, ge=0)
    """Added to the standard deviation that divides; TRL's is 1e-4."""


class GRPOPassKOptions(Options):
    """``[algorithm.grpo_passk]``"""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation."""


class GDPOOptions(Options):
    """``[algorithm.gdpo]``"""

    whiten_batch: bool = True
    """Standardise the sum over the rollouts of the batch."""


class GAEOptions(Options):
    """``[algorithm.gae]``"""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of a token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Trace: 1 takes the whole return, 0 the next value alone."""
    whiten_batch: bool = True
    """Standardise the advantages over the sampled tokens of the batch."""


class RewardToGoOptions(Options):
    """``[algorithm.reinforce]``, ``[algorithm.reinforce_plus_plus]``"""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of a token."""


class DistillAdvantageOptions(Options):
    """``[algorithm.distill]``"""

    gamma: float = Field(0.0, ge=0, le=1)
    """Discount of a token: 0 gives each token its own log-ratio alone, over 0 also those that follow it."""


class GPGOptions(Options):
    """``[algorithm.gpg]``"""

    f_norm: float = Field(1.0, gt=0)
    """Constant divisor of the advantages."""
