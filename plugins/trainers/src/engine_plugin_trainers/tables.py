"""The table of pair losses: ``engine_pair_losses``, entry-point group ``engine.pair_losses``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.hooks import hookspec
from engine_core.specs import Spec


@dataclass(frozen=True, kw_only=True)
class PairLoss(Spec):
    """A loss of pairs of responses, ``f(chosen, rejected, beta=..., **keys) -> [P]``, for trainer ``dpo``.

    ``chosen`` and ``rejected`` [P] are the scores of the two responses, with gradient: log-ratios to the
    reference (log-probs without a reference), summed or averaged over tokens.

    Args:
        reference: the loss compares with a reference model.
        divergence: `dpo.f_divergence` may be set.
        normalized: scores are means over tokens, unless `dpo.length_normalize` is set otherwise.
        may_normalize: `dpo.length_normalize` may be set.
        sft_coef: the default of `dpo.sft_coef`.
        reads: other keys of ``[dpo]`` that the function receives: ``label_smoothing``, ``simpo_gamma``,
            ``discopop_tau``. A pair loss has no separate option table.
    """

    kind = "pair_losses"
    noun = "pair loss"
    given = ("chosen", "rejected")
    reference: bool = True
    divergence: bool = True
    normalized: bool = False
    may_normalize: bool = True
    sft_coef: float = 0.0
    reads: frozenset[str] = frozenset()

    @property
    def keywords(self) -> frozenset[str]:
        """The names of the function's keyword arguments."""
        return frozenset({"beta", *self.reads})


SPECS = {"pair_losses": PairLoss}


@hookspec
def engine_pair_losses() -> Mapping[str, PairLoss]:
    """Offer losses of pairs of responses for ``[dpo] loss = "NAME"``.

    :returns: a ``PairLoss`` for each name, such as ``PairLoss(load=squared)`` for a function ``def squared(chosen, rejected, beta)``.
        It declares the other keys of ``[dpo]`` that the function reads.

    Collects from all plugins; entry-point group ``engine.pair_losses``. Called once in every process. Not collective.
    """
