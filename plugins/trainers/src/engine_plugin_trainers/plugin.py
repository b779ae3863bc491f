"""Plugin of the supervised, preference, reward-model, distillation, offline and asynchronous trainers, and of further algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from engine_core.hooks import hookimpl
from engine_core.specs import (
    SAMPLING_SECTIONS,
    SHARED_SECTIONS,
    Advantage,
    Loss,
    Objective,
    Part,
    Stage,
    TrainerSpec,
)
from engine_plugin_trainers import options

if TYPE_CHECKING:
    from engine_plugin_trainers.tables import PairLoss

RL = SHARED_SECTIONS | SAMPLING_SECTIONS | {"ref", "critic", "teacher", "algorithm"}


@hookimpl
def engine_trainers() -> Mapping[str, TrainerSpec]:
    """Offer the trainers."""
    here = "engine_plugin_trainers."
    return {
        "async": TrainerSpec(
            load=here + "async_trainer:AsyncTrainer",
            config=options.AsyncOptions,
            sections=RL | {"async"},
            required=frozenset({"reward", "data"}),
            concurrent=True,
        ),
        "offline": TrainerSpec(
            load=here + "offline_trainer:OfflineTrainer",
            sections=RL,
            required=frozenset({"data"}),
            for_eval=SAMPLING_SECTIONS - {"stage"},
            stored=True,
        ),
        "sft": TrainerSpec(
            load=here + "sft:SFTTrainer",
            config=options.SFTOptions,
            sections=SHARED_SECTIONS | {"sft"},
            required=frozenset({"data"}),
        ),
        "distill": TrainerSpec(
            load=here + "distill:DistillTrainer",
            config=options.DistillOptions,
            sections=SHARED_SECTIONS | SAMPLING_SECTIONS | {"distill", "teacher"},
            required=frozenset({"data", "teacher"}),
        ),
        "dpo": TrainerSpec(
            load=here + "preference:DPOTrainer",
            config=options.DPOOptions,
            sections=SHARED_SECTIONS | {"dpo", "ref"},
            required=frozenset({"data"}),
        ),
        "kto": TrainerSpec(
            load=here + "kto:KTOTrainer",
            config=options.KTOOptions,
            sections=SHARED_SECTIONS | {"kto", "ref"},
            required=frozenset({"data"}),
        ),
        "reward_model": TrainerSpec(
            load=here + "reward_model:RewardModelTrainer",
            config=options.RewardModelOptions,
            sections=SHARED_SECTIONS | {"reward_model"},
            required=frozenset({"data"}),
        ),
    }


@hookimpl
def engine_advantages() -> Mapping[str, Advantage]:
    """Offer further estimators."""
    here, tokens = (
        f"engine_plugin_trainers.algorithms.{name}:" for name in ("advantages", "advantages_token_baseline")
    )
    grouped = frozenset({"rewards", "group_ids"})
    compared = partial(Advantage, min_group_size=2)
    apart = partial(compared, per_group=True)
    of_tokens = partial(apart, needs=grouped | {"old_log_probs", "sum_pi_squared"})
    return {
        "distill": Advantage(
            load=here + "distill",
            config=options.DistillAdvantageOptions,
            needs=frozenset({"old_log_probs", "teacher_log_probs"}),
            per_group=True,
        ),
        "gdpo": compared(
            load=here + "gdpo", config=options.GDPOOptions, needs=frozenset({"reward_terms", "group_ids"})
        ),
        "gpg": compared(load=here + "gpg", config=options.GPGOptions),
        "grpo_passk": apart(load=here + "grpo_passk", config=options.GRPOPassKOptions),
        "opo": apart(load=here + "opo", needs=grouped | {"response_lengths"}),
        "optimal_token_baseline": of_tokens(load=tokens + "optimal_token_baseline"),
        "optimal_token_baseline_multi_turn": of_tokens(load=tokens + "optimal_token_baseline_multi_turn"),
        "reinforce_plus_plus": Advantage(
            load=here + "reinforce_plus_plus",
            config=options.ReinforcePlusPlusOptions,
            needs=frozenset({"rewards"}),
        ),
        "reinforce_plus_plus_baseline": compared(load=here + "reinforce_plus_plus_baseline"),
        "remax": Advantage(load=here + "remax", needs=frozenset({"rewards", "greedy_rewards"})),
    }


@hookimpl
def engine_losses() -> Mapping[str, Loss]:
    """Offer further policy losses."""
    here = "engine_plugin_trainers.algorithms.losses:"
    of_rollout = "seq-mean-token-mean"
    return {
        "cispo": Loss(load=here + "cispo", config=options.CISPOOptions),
        "dppo_kl": Loss(load=here + "dppo_kl", config=options.DPPOKLOptions),
        "dppo_tv": Loss(load=here + "dppo_tv", config=options.DPPOTVOptions),
        "dro": Loss(load=here + "dro", config=options.DROOptions, ratio=False),
        "gmpo": Loss(load=here + "gmpo", config=options.GMPOOptions, aggregation=of_rollout),
        "gspo": Loss(load=here + "gspo", config=options.GSPOOptions, aggregation=of_rollout),
        "luspo": Loss(load=here + "luspo", config=options.GSPOOptions, aggregation="seq-mean-token-sum"),
        "sapo": Loss(load=here + "sapo", config=options.SAPOOptions, aggregation=of_rollout),
        "vespo": Loss(load=here + "vespo", config=options.VESPOOptions),
    }


@hookimpl
def engine_stages() -> Mapping[str, Stage]:
    """Offer resampling and the replay cache."""
    here = "engine_plugin_trainers.algorithms."
    return {
        "dynamic_sampling": Stage(
            load=here + "resampling:dynamic_sampling", config=options.DynamicSamplingOptions
        ),
        "pf_ppo_resample": Stage(load=here + "resampling:pf_ppo_resample", config=options.PFPPOOptions),
        "replay_cache": Stage(
            load=here + "replay_cache:ReplayCache", config=options.ReplayCacheOptions, off_policy=True
        ),
    }


@hookimpl
def engine_pair_losses() -> Mapping[str, PairLoss]:
    """Offer DPO and its variants."""
    return options.PAIR_LOSSES


@hookimpl
def engine_objectives() -> Mapping[str, Objective]:
    """Offer the objectives of distillation and preferences."""
    pairs = "engine_plugin_trainers.algorithms.preference_objectives:"
    return {
        "distill": Objective(load="engine_plugin_trainers.algorithms.distillation:distill"),
        "kto": Objective(load=pairs + "kto"),
        "preference": Objective(load=pairs + "make_preference", factory=True),
        "reward_model": Objective(load=pairs + "reward_model"),
    }


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Offer the rounds of curricula, early stopping and the streaming update."""
    return {
        "curriculum": Part(load="engine_plugin_trainers.data.curriculum:CurriculumOrder"),
        "early_stop": Part(load="engine_plugin_trainers.early_stop:Stragglers"),
        "stream_update": Part(load="engine_plugin_trainers.stream_update:stream_update"),
    }
