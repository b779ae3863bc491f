"""Option tables of the trainers, and the declarations of the pair losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine_core.errors import PluginError, did_you_mean
from engine_core.specs import NoOptions, Options, RefillOptions
from engine_plugin_trainers.tables import PairLoss


class AsyncOptions(Options):
    """``[async]``: options of the trainer `async`."""

    max_staleness: int = Field(1, ge=0)
    """Maximum age of a token at its update, in policy versions. 0: the run samples nothing ahead, like the trainer ``rl``. 1: one step off-policy."""
    weight_updates: Literal["auto", "keep", "abort", "drain"] = "auto"
    """Treatment of in-flight responses when the weights change. ``keep``: responses continue with the new weights. ``abort``: responses are stopped and then resume at the same token. ``drain``: the update waits until the responses are finished. ``auto``: ``keep`` if the sampler can pause, else ``drain``."""
    order: Literal["ready", "admitted"] = "ready"
    """Order in which a step takes groups. ``ready``: complete groups first, as long as no other group becomes too old. ``admitted``: the order of the data, even if a slow group delays the step."""

    @property
    def updates_weights_in_flight(self) -> bool:
        """Whether weights may change while responses are in flight."""
        return self.max_staleness > 0 and self.weight_updates != "drain"


class SFTOptions(Options):
    """``[sft]``: options of the trainer `sft`."""

    max_tokens: int = Field(4096, gt=0)
    """Maximum length of a sequence, in tokens. A longer sequence follows `data.over_long`."""
    train_on_prompt: bool = False
    """Also learn the tokens of the prompt, except the first token of a sequence, which nothing predicts."""


class DistillOptions(Options):
    """``[distill]``: options of the trainer `distill`."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence that is minimized. ``reverse_kl``: KL(student, teacher). ``forward_kl``: KL(teacher, student). ``jsd``: generalized Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649)."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """``jsd``: share b of the teacher in the mixture. For b near 0 the divergence is about b times the forward KL. For b near 1 the divergence is about (1 - b) times the reverse KL."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """K: number of the teacher's most likely tokens that are compared one by one at each position. All other tokens are compared as one sum. 0: the whole vocabulary. Default: 128, or the whole vocabulary if it is smaller."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Softmax temperature of both distributions; default: `rollout.temperature`."""
    data_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the steps that learn from the responses of the data instead of the student's responses. With 1, sampling happens only in evaluations. In an epoch, each row is used once, by a step of either kind; with `data.curriculum`, which orders only prompts, by each kind."""
    max_tokens: int = Field(4096, gt=0)
    """Maximum length, in tokens, of a sequence in a step from the data. A longer sequence follows `data.over_long`."""
    max_values: int = Field(67_108_864, gt=0)
    """Maximum number of the teacher's log-probs in memory at the same time (tokens times K; 12 bytes each). A step is processed in parts of this size. A longer sequence is a separate part."""


class ReplayCacheOptions(Options):
    """``[stage.replay_cache]``: options of the stage `replay_cache`."""

    share: float = Field(0.5, ge=0, lt=1)
    """Share of the batch's groups that come from the cache. These groups are added to the new groups: 0.5 doubles the batch."""
    size: int = Field(256, gt=0)
    """Maximum number of stored groups. The oldest groups are dropped first."""
    max_staleness: int = Field(8, gt=0)
    """Maximum age of a group's oldest token, in policy versions (weight updates). An older group is dropped."""
    seed: int = Field(0, ge=0)
    """Seed of the draw. The number of the step is added to the seed."""

    @property
    def growth(self) -> float:
        """Factor by which a full cache enlarges the batch."""
        return 1 / (1 - self.share)


class PFPPOOptions(Options):
    """``[stage.pf_ppo_resample]``: options of the stage `pf_ppo_resample`."""

    method: Literal["pow", "max_min", "max_random"] = "pow"
    """Probability P of a rollout with reward R. ``pow``: P ∝ |R|^`power`. ``max_min``: only the highest and the lowest R. ``max_random``: 0.4 for the highest R, 0.1 for the others."""
    power: float = Field(2.0, ge=0)
    """Exponent of ``pow``."""
    seed: int = Field(0, ge=0)
    """Seed of the resampling. The number of the step is added to the seed."""


Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]


_SMOOTHED = frozenset({"label_smoothing"})

_HERE = "engine_plugin_trainers.algorithms.preference:"

PAIR_LOSSES: dict[str, PairLoss] = {
    "apo_down": PairLoss(load=_HERE + "apo_down", divergence=False),
    "apo_zero": PairLoss(load=_HERE + "apo_zero", divergence=False),
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
"""The pair losses of this distribution."""

READABLE = ("label_smoothing", "simpo_gamma", "discopop_tau")
"""Keys of ``[dpo]`` that a pair loss may read, besides beta."""


def check_offered(name: str, spec: PairLoss) -> None:
    """Refuse a plugin's pair loss that declares inputs which pair losses do not receive.

    Raises:
        PluginError: the loss has an option table, or reads a key that is not in ``READABLE``.
    """
    if spec.config is not NoOptions:
        raise PluginError(
            f"Pair loss '{name}': it has an option table, but pair losses cannot have one. They read keys of [dpo]: "
            f"PairLoss(reads=...) of {', '.join(READABLE)}."
        )
    if unknown := sorted(spec.reads - set(READABLE)):
        raise PluginError(
            f"Pair loss '{name}' reads '{unknown[0]}', which pair losses do not receive."
            + did_you_mean(unknown[0], READABLE)
        )


class DPOOptions(Options):
    """``[dpo]``: options of the trainer `dpo`."""

    chooses = {"loss": "pair_losses"}

    loss: str = "sigmoid"
    """Pair loss, by name (``engine plugins``). ``orpo``, ``simpo`` and ``cpo`` load no reference model."""
    beta: Temperature = 0.1
    """Factor from log-ratios to rewards. A larger value keeps the policy closer to the reference. SimPO's paper uses 2 and more. IPO's paper calls this factor tau."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose labels are swapped. The losses ``cdpo``, ``robust``, ``exo_pair`` (over 0), ``cpo`` and ``simpo`` read this key."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Divergence that keeps the policy near the reference (https://arxiv.org/abs/2309.16240)."""
    f_alpha: Annotated[float, Field(allow_inf_nan=False)] = 0.5
    """Parameter of the divergence ``alpha``; the value 1 is the reverse KL."""
    length_normalize: bool | None = None
    """Use the mean of the log-ratios over the response's tokens instead of the sum. Default: the definition of the loss (mean for ``ipo``, ``sigmoid_norm``, ``simpo``, ``orpo``)."""
    reference_free: bool = False
    """Use no reference model. The loss then assumes a reference to which all responses are equally likely."""
    sft_coef: Coefficient | None = None
    """Weight of the mean negative log-likelihood of the chosen responses' tokens (RPO). Default: 1 for ``orpo`` and ``cpo``, else 0."""
    simpo_gamma: Coefficient = 0.5
    """``simpo``: target margin between the chosen reward and the rejected reward."""
    discopop_tau: Temperature = 0.05
    """``discopop``: temperature of the blend."""
    wpo: bool = False
    """Weight each pair by the probability that the current policy samples its responses (WPO, https://arxiv.org/abs/2406.11827)."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """LD-DPO (https://arxiv.org/abs/2409.06411): weight of the tokens beyond the length of the pair's shorter response. Not available for means over tokens. Default: 1."""
    max_tokens: int = Field(4096, gt=0)
    """Maximum length of a sequence, in tokens. A pair with a longer sequence follows `data.over_long`."""

    @model_validator(mode="after")
    def _is_read(self) -> DPOOptions:
        """Refuse keys that the loss does not read."""
        if self.loss in PAIR_LOSSES:  # a plugin's loss is checked when it is loaded
            self.judge(PAIR_LOSSES[self.loss])
        return self

    def judge(self, traits: PairLoss) -> None:
        """Refuse keys that the loss does not read.

        Raises:
            ValueError: the loss does not read a key; the message names the first one.
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
                f"loss = '{self.loss}' uses means over tokens by definition. Remove length_normalize."
            )
        if self.ld_alpha is not None and self.normalizes(traits):
            raise ValueError(
                f"ld_alpha weights the tail of a sum over tokens, but loss = '{self.loss}' uses means here. Remove it."
            )
        if self.loss == "exo_pair" and self.label_smoothing == 0:
            raise ValueError("loss = 'exo_pair' needs label_smoothing over 0; its paper uses 1e-3.")

    def normalizes(self, traits: PairLoss) -> bool:
        """Return whether log-ratios are means over tokens."""
        return traits.normalized if self.length_normalize is None else self.length_normalize

    def nll_weight(self, traits: PairLoss) -> float:
        """Return the weight of the chosen responses' negative log-likelihood."""
        return traits.sft_coef if self.sft_coef is None else self.sft_coef


class KTOOptions(Options):
    """``[kto]``: options of the trainer `kto`."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """``kto``: compare each response with the KL to the reference. ``apo_zero_unpaired``: compare each response with 0 (https://arxiv.org/abs/2408.06266)."""
    beta: Temperature = 0.1
    """Factor from log-ratios to rewards. A larger value keeps the policy closer to the reference."""
    desirable_weight: Coefficient = 1.0
    """Weight of desirable responses. The paper advises this ratio between 1 and 4/3: (weight x number) of desirable responses divided by (weight x number) of undesirable responses."""
    undesirable_weight: Coefficient = 1.0
    """Weight of undesirable responses."""
    max_tokens: int = Field(4096, gt=0)
    """Maximum length of a sequence, in tokens. A longer sequence follows `data.over_long`."""


class RewardModelOptions(Options):
    """``[reward_model]``: options of the trainer `reward_model`."""

    center_coef: Coefficient = 0.0
    """Weight of the mean squared sum of a pair's scores. This term centers scores around 0 (https://arxiv.org/abs/2312.09244)."""
    max_tokens: int = Field(4096, gt=0)
    """Maximum length of a sequence, in tokens. A pair with a longer sequence follows `data.over_long`."""


class GRPOPassKOptions(Options):
    """``[algorithm.grpo_passk]``: options of the advantage estimator `grpo_passk`."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation."""


class GDPOOptions(Options):
    """``[algorithm.gdpo]``: options of the advantage estimator `gdpo`."""

    whiten_batch: bool = True
    """Standardize the sum over the rollouts of the batch."""


class GPGOptions(Options):
    """``[algorithm.gpg]``: options of the advantage estimator `gpg`."""

    f_norm: float = Field(1.0, gt=0)
    """Constant divisor of the advantages."""


class GSPOOptions(Options):
    """``[algorithm.gspo]``, ``[algorithm.luspo]``: options of the policy losses `gspo` and `luspo`."""

    clip_ratio_low: float = Field(3e-4, ge=0)
    """The lower bound of a sequence's ratio is 1 - `clip_ratio_low`. The value is small because the ratio is a geometric mean over tokens."""
    clip_ratio_high: float = Field(4e-4, ge=0)
    """The upper bound of a sequence's ratio is 1 + `clip_ratio_high`."""


class GMPOOptions(Options):
    """``[algorithm.gmpo]``: options of the policy loss `gmpo`."""

    clip_ratio_low: float = Field(0.4, ge=0)
    """The lower bound of the log of a token's ratio is -`clip_ratio_low`."""
    clip_ratio_high: float = Field(0.4, ge=0)
    """The upper bound of the log of a token's ratio is `clip_ratio_high`."""


class CISPOOptions(Options):
    """``[algorithm.cispo]``: options of the policy loss `cispo`."""

    clip_ratio_low: float = Field(1.0, ge=0)
    """The lower bound of a token's weight is 1 - `clip_ratio_low`; 1: no bound."""
    clip_ratio_high: float = Field(4.0, ge=0)
    """The upper bound of a token's weight is 1 + `clip_ratio_high`."""


class SAPOOptions(Options):
    """``[algorithm.sapo]``: options of the policy loss `sapo`."""

    tau_pos: float = Field(1.0, gt=0)
    """Temperature of the gate for positive advantages. A higher temperature makes the gate decay faster."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature of the gate for other advantages."""


class DPPOTVOptions(Options):
    """``[algorithm.dppo_tv]``: options of the policy loss `dppo_tv`."""

    threshold_low: float = Field(0.2, ge=0)
    """If the probability of a token fell by more than `threshold_low`, the update does not lower it further."""
    threshold_high: float = Field(0.2, ge=0)
    """If the probability of a token rose by more than `threshold_high`, the update does not raise it further."""
    cap: float = Field(20.0, gt=0)
    """Upper bound of the ratio that weighs a token."""


class DPPOKLOptions(Options):
    """``[algorithm.dppo_kl]``: options of the policy loss `dppo_kl`."""

    threshold_low: float = Field(0.05, ge=0)
    """If the probability of a token fell and the KL is above `threshold_low`, the update does not lower the probability further."""
    threshold_high: float = Field(0.05, ge=0)
    """If the probability of a token rose and the KL is above `threshold_high`, the update does not raise the probability further."""
    cap: float = Field(20.0, gt=0)
    """Upper bound of the ratio that weighs a token."""


class DROOptions(Options):
    """``[algorithm.dro]``: options of the policy loss `dro`."""

    beta: float = Field(0.1, ge=0)
    """Weight of the squared log-ratio."""


class VESPOOptions(Options):
    """``[algorithm.vespo]``: options of the policy loss `vespo`."""

    k_pos: float = Field(2.0, ge=0)
    """Power of a sequence's weight, for positive advantages."""
    lambda_pos: float = Field(3.0, gt=0)
    """Decay in a sequence's weight, for positive advantages."""
    k_neg: float = Field(3.0, ge=0)
    """Power of a sequence's weight, for other advantages."""
    lambda_neg: float = Field(2.0, gt=0)
    """Decay in a sequence's weight, for other advantages."""


class DistillAdvantageOptions(Options):
    """``[algorithm.distill]``: options of the advantage estimator `distill`."""

    gamma: float = Field(0.0, ge=0, le=1)
    """Discount per token. With 0, a token's advantage is its log-ratio. Above 0, the log-ratios of later tokens are added."""


class ReinforcePlusPlusOptions(Options):
    """``[algorithm.reinforce_plus_plus]``: options of the advantage estimator `reinforce_plus_plus`."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""


class DynamicSamplingOptions(RefillOptions):
    """``[stage.dynamic_sampling]``: options of the stage `dynamic_sampling`."""

    reward: str | None = None
    """Name of a reward. A group is dropped if this reward is equal in all its rollouts. Default: the sum of all rewards."""
