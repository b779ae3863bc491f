"""Plugin of the supervised, preference, reward-model, distillation, offline and asynchronous trainers."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import (
    SAMPLING_SECTIONS,
    SHARED_SECTIONS,
    Advantage,
    Objective,
    PairLoss,
    Part,
    Stage,
    TrainerSpec,
)
from engine_plugin_trainers.options import (
    PAIR_LOSSES,
    AsyncOptions,
    DistillOptions,
    DPOOptions,
    KTOOptions,
    PFPPOOptions,
    ReplayCacheOptions,
    RewardModelOptions,
    SFTOptions,
)

RL = SHARED_SECTIONS | SAMPLING_SECTIONS | {"ref", "critic", "teacher", "algorithm"}


@hookimpl
def engine_trainers() -> Mapping[str, TrainerSpec]:
    """Offer the trainers."""
    here = "engine_plugin_trainers."
    return {
        "async": TrainerSpec(
            load=here + "async_trainer:AsyncTrainer",
            config=AsyncOptions,
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
            config=SFTOptions,
            sections=SHARED_SECTIONS | {"sft"},
            required=frozenset({"data"}),
        ),
        "distill": TrainerSpec(
            load=here + "distill:DistillTrainer",
            config=DistillOptions,
            sections=SHARED_SECTIONS | SAMPLING_SECTIONS | {"distill", "teacher"},
            required=frozenset({"data", "teacher"}),
        ),
        "dpo": TrainerSpec(
            load=here + "preference:DPOTrainer",
            config=DPOOptions,
            sections=SHARED_SECTIONS | {"dpo", "ref"},
            required=frozenset({"data"}),
        ),
        "kto": TrainerSpec(
            load=here + "kto:KTOTrainer",
            config=KTOOptions,
            sections=SHARED_SECTIONS | {"kto", "ref"},
            required=frozenset({"data"}),
        ),
        "reward_model": TrainerSpec(
            load=here + "reward_model:RewardModelTrainer",
            config=RewardModelOptions,
            sections=SHARED_SECTIONS | {"reward_model"},
            required=frozenset({"data"}),
        ),
    }


@hookimpl
def engine_advantages() -> Mapping[str, Advantage]:
    """Offer the optimal token baselines."""
    here = "engine_plugin_trainers.algorithms.advantages_token_baseline:"
    needs = frozenset({"rewards", "group_ids", "old_log_probs", "sum_pi_squared"})
    names = ("optimal_token_baseline", "optimal_token_baseline_multi_turn")
    return {
        name: Advantage(load=here + name, needs=needs, min_group_size=2, per_group=True) for name in names
    }


@hookimpl
def engine_stages() -> Mapping[str, Stage]:
    """Offer resampling and the replay cache."""
    here = "engine_plugin_trainers.algorithms."
    return {
        "pf_ppo_resample": Stage(load=here + "resampling:pf_ppo_resample", config=PFPPOOptions),
        "replay_cache": Stage(
            load=here + "replay_cache:ReplayCache", config=ReplayCacheOptions, off_policy=True
        ),
    }


@hookimpl
def engine_pair_losses() -> Mapping[str, PairLoss]:
    """Offer DPO and its variants."""
    return PAIR_LOSSES


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
    """Offer early stopping and the streaming update."""
    return {
        "early_stop": Part(load="engine_plugin_trainers.early_stop:Stragglers"),
        "stream_update": Part(load="engine_plugin_trainers.stream_update:stream_update"),
    }
