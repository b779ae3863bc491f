"""Option tables of the trainers, and what each pair loss of preferences reads of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from engine_core.errors import PluginError, did_you_mean
from engine_core.specs import NoOptions, Options, PairLoss


class AsyncOptions(Options):
    """``[async]``"""

    max_staleness: int = Field(1, ge=0)
    """How many policy versions old a token may be when it is learned from. 0: nothing is sampled ahead, and the run is that of ``rl``; 1: one step off."""
    weight_updates: Literal["auto", "keep", "abort", "drain"] = "auto"
    """What becomes of responses that are being sampled when the weights change. ``keep``: they go on with the new weights; ``abort``: they are stopped, and go on from where they were; ``drain``: the update waits for them. ``auto``: ``keep`` where the sampler can pause, else ``drain``."""
    order: Literal["ready", "admitted"] = "ready"
    """Which groups a step takes: those that are ready first, as long as no other becomes too old; or in the order of the data, whatever takes long."""

    @property
    def updates_weights_in_flight(self) -> bool:
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

    renamed = {"max_age": "max_staleness"}

    share: float = Field(0.5, ge=0, lt=1)
    """Share of the batch's groups that come from the cache; they are added to the new ones: with 0.5 as many again."""
    size: int = Field(256, gt=0)
    """Groups that are kept; the oldest leave first."""
    max_staleness: int = Field(8, gt=0)
    """A group leaves when its oldest token is more policy versions (weight updates) behind the sampler than this."""
    seed: int = Field(0, ge=0)
    """Seed of the draw; the step is added to it."""


Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]


_SMOOTHED = frozenset({"label_smoothing"})

_HERE = "engine_plugin_trainers.algorithms.preference:"

PAIR_LOSSES: dict[str, PairLoss] = {
    "aot": PairLoss(load=_HERE + "aot", divergence=False, reads=_SMOOTHED, statistic="order"),
    "aot_unpaired": PairLoss(load=_HERE + "cdpo", divergence=False, reads=_SMOOTHED, statistic="matching"),
    "apo_down": PairLoss(load=_HERE + "apo_down", divergence=False),
    "apo_zero": PairLoss(load=_HERE + "apo_zero", divergence=False),
    "bco_pair": PairLoss(load=_HERE + "bco_pair", statistic="mean"),
    "cdpo": PairLoss(load=_HERE + "cdpo", reads=_SMOOTHED),
    "cpo": PairLoss(load=_HERE + "cdpo", reference=False, divergence=False, sft_coef=1.0, reads=_SMOOTHED),
    "discopop": PairLoss(load=_HERE + "discopop", reads=frozenset({"discopop_tau"})),
    "exo_pair": PairLoss(load=_HERE + "exo_pair", reads=_SMOOTHED),
    "hinge": PairLoss(load=_HERE + "hinge"),
    "ipo": PairLoss(load=_HERE + "ipo", normalized=True),
    "nca_pair": PairLoss(load=_HERE + "nca_pair"),
    "orpo": PairLoss(
        load=_HERE + "orpo",
        reference=False,
        divergence=False,
        normalized=True,
        may_normalize=False,
        sft_coef=1.0,
    ),
    "robust": PairLoss(load=_HERE + "robust", reads=_SMOOTHED),
    "sigmoid": PairLoss(load=_HERE + "sigmoid"),
    "sigmoid_norm": PairLoss(load=_HERE + "sigmoid", normalized=True, may_normalize=False),
    "simpo": PairLoss(
        load=_HERE + "simpo",
        reference=False,
        divergence=False,
        normalized=True,
        may_normalize=False,
        reads=_SMOOTHED | {"simpo_gamma"},
    ),
    "sppo_hard": PairLoss(load=_HERE + "sppo_hard"),
}
"""The core's own."""


READABLE = ("label_smoothing", "simpo_gamma", "discopop_tau")
"""Keys of ``[dpo]`` that a pair loss may read, besides beta."""


def check_offered(name: str, spec: PairLoss) -> None:
    """Refuse a plugin's pair loss that asks for what it would not be given.

    Raises:
        PluginError: an option table, or a key that is none of ``READABLE``.
    """
    if spec.config is not NoOptions:
        raise PluginError(
            f"Pair loss '{name}': it has an option table, and pair losses have none. They read keys of [dpo]: "
            f"PairLoss(reads=...) of {', '.join(READABLE)}."
        )
    if unknown := sorted(spec.reads - set(READABLE)):
        raise PluginError(
            f"Pair loss '{name}' reads '{unknown[0]}', which is not given to pair losses."
            + did_you_mean(unknown[0], READABLE)
        )


class DPOOptions(Options):
    """``[dpo]``"""

    chooses = {"loss": "pair_losses"}
    renamed = {"length_normalise": "length_normalize"}
    _spec: PairLoss | None = PrivateAttr(None)  # of a plugin's loss

    loss: str = "sigmoid"
    """What a pair of responses costs, by name (``engine plugins``); ``orpo``, ``simpo`` and ``cpo`` build no reference model."""
    beta: Temperature = 0.1
    """Factor from log-ratios to rewards; larger stays closer to the reference. SimPO's paper has 2 and more, IPO's calls it tau."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are taken to be the wrong way round: ``cdpo``, ``robust``, ``exo_pair`` (over 0), ``aot``, ``aot_unpaired``, ``cpo``, ``simpo``."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Divergence that keeps the policy near the reference (https://arxiv.org/abs/2309.16240)."""
    f_alpha: Annotated[float, Field(allow_inf_nan=False)] = 0.5
    """Of the divergence ``alpha``; 1 is the reverse KL."""
    length_normalize: bool | None = None
    """Log-ratios are means over the response's tokens, not sums; default: as the loss is defined (``ipo``, ``sigmoid_norm``, ``simpo``, ``orpo``: means)."""
    reference_free: bool = False
    """Compare with no reference: every response is equally likely there."""
    sft_coef: Coefficient | None = None
    """Weight of the mean negative log-likelihood of the chosen responses' tokens (RPO); default: 1 for ``orpo`` and ``cpo``, else 0."""
    simpo_gamma: Coefficient = 0.5
    """``simpo``: by how much the chosen reward is to be higher."""
    discopop_tau: Temperature = 0.05
    """``discopop``: temperature of the blend."""
    wpo: bool = False
    """Weigh each pair by how likely the current policy is to say its responses (WPO, https://arxiv.org/abs/2406.11827)."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """LD-DPO (https://arxiv.org/abs/2409.06411): weight of the tokens by which a response is longer than the other one of its pair; not for means over tokens. Default: 1."""
    max_tokens: int = Field(4096, gt=0)
    """Longest sequence; a pair with a longer one follows `data.over_long`."""

    @model_validator(mode="after")
    def _is_read(self) -> DPOOptions:
        if self.loss in PAIR_LOSSES:  # a plugin's is judged when it is loaded
            self.judge(PAIR_LOSSES[self.loss])
        return self

    def judge(self, traits: PairLoss) -> None:
        """Refuse keys that the loss does not read.

        Raises:
            ValueError: the first of them.
        """
        given = self.model_fields_set
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        changed = {name for name in given if getattr(self, name) != defaults[name]}
        for name in sorted(changed & set(READABLE)):
            if name not in traits.reads:
                having = ", ".join(sorted(loss for loss, t in PAIR_LOSSES.items() if name in t.reads))
                raise ValueError(
                    f"loss = '{self.loss}' does not read {name}. Remove it, or choose one of {having}."
                )
        if not traits.divergence and self.f_divergence != "reverse_kl":
            raise ValueError(f"loss = '{self.loss}' does not read f_divergence. Remove it.")
        if "f_alpha" in changed and self.f_divergence != "alpha":
            raise ValueError("f_alpha is read with f_divergence = 'alpha' only. Remove it, or set that.")
        if not traits.may_normalize and self.length_normalize not in (None, traits.normalized):
            raise ValueError(
                f"loss = '{self.loss}' is over means of tokens by definition. Remove length_normalize."
            )
        means = traits.normalized if self.length_normalize is None else self.length_normalize
        if self.ld_alpha is not None and means:
            raise ValueError(
                f"ld_alpha weighs the tail of a sum over tokens, and loss = '{self.loss}' is over means here. Remove it."
            )
        if self.loss == "exo_pair" and self.label_smoothing == 0:
            raise ValueError("loss = 'exo_pair' needs label_smoothing over 0; its paper has 1e-3.")

    @property
    def traits(self) -> PairLoss:
        """Of the loss."""
        return self._spec or PAIR_LOSSES[self.loss]

    def of(self, spec: PairLoss) -> DPOOptions:
        """These options, with what the loss is made of."""
        self._spec = spec
        return self

    @property
    def needs_reference(self) -> bool:
        """Log-probs of a reference model are compared with."""
        return self.traits.reference and not self.reference_free

    @property
    def normalises(self) -> bool:
        """Log-ratios are means over tokens."""
        return self.traits.normalized if self.length_normalize is None else self.length_normalize

    @property
    def nll_weight(self) -> float:
        """Weight of the chosen responses' negative log-likelihood."""
        return self.traits.sft_coef if self.sft_coef is None else self.sft_coef


class KTOOptions(Options):
    """``[kto]``"""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """``kto`` holds each response against the KL to the reference, ``apo_zero_unpaired`` against none (https://arxiv.org/abs/2408.06266)."""
    beta: Temperature = 0.1
    """Factor from log-ratios to rewards; larger stays closer to the reference."""
    desirable_weight: Coefficient = 1.0
    """Weight of desirable responses. The paper advises that weight times number of the two kinds be within 4/3 of each other."""
    undesirable_weight: Coefficient = 1.0
    """Weight of undesirable ones."""
    max_tokens: int = Field(4096, gt=0)
    """Longest sequence; a longer one follows `data.over_long`."""


class RewardModelOptions(Options):
    """``[reward_model]``"""

    center_coef: Coefficient = 0.0
    """Weight of the mean square of the sum of a pair's scores, which keeps scores around 0 (https://arxiv.org/abs/2312.09244)."""
    max_tokens: int = Field(4096, gt=0)
    """Longest sequence; a pair with a longer one follows `data.over_long`."""


class ClipCovOptions(Options):
    """``[algorithm.clip_cov]``"""

    clip_ratio_low: float = Field(1.0, ge=0)
    """The ratio is held above 1 - this."""
    clip_ratio_high: float = Field(1.0, ge=0)
    """The ratio is held below 1 + this."""
    clip_cov_ratio: float = Field(2e-4, ge=0, le=1)
    """Share of the mini-batch's loss tokens that lose their gradient, at least one of them."""
    clip_cov_lb: float = 1.0
    """They are chosen among those with a covariance over this."""
    clip_cov_ub: float = 5.0
    """They are chosen among those with a covariance under this."""


class KLCovOptions(Options):
    """``[algorithm.kl_cov]``"""

    ppo_kl_coef: float = Field(1.0, ge=0)
    """Weight of |log ratio| on the chosen tokens."""
    kl_cov_ratio: float = Field(2e-4, ge=0, le=1)
    """Share of the mini-batch's loss tokens that are chosen, at least one: those of the largest covariance."""
