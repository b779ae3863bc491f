"""The core's own names, offered through the same hooks as a stranger's.

Only strings and option models here: what is named is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.algorithms.advantage_options import (
    GAEOptions,
    GDPOOptions,
    GPGOptions,
    GRPOOptions,
    GRPOPassKOptions,
    RewardToGoOptions,
)
from engine_core.algorithms.options import PPOClipOptions
from engine_core.algorithms.stage_options import DynamicSamplingOptions, PFPPOOptions
from engine_core.engines.torch_options import TorchOptions
from engine_core.hookspecs import hookimpl
from engine_core.runtime.options import LocalOptions
from engine_core.specs import Advantage, Loss, RuntimeSpec, Stage, TrackerSpec, TrainBackend, TrainerSpec
from engine_core.tracking_options import TensorBoardOptions, WandbOptions
from engine_core.trainers.options import SFTOptions

SHARED = frozenset(
    {
        "trainer",
        "plugins",
        "model",
        "actor",
        "data",
        "run",
        "checkpoint",
        "tracking",
        "runtime",
        "placement",
        "schedule",
        "eval",
    }
)
ROLLOUTS = frozenset({"rollout", "reward", "stage"})


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    return {
        "torch": TrainBackend(
            load="engine_core.engines.torch_engine:TorchEngine",
            config=TorchOptions,
            capabilities=frozenset({"generation_module", "set_lr", "sleep"}),
        )
    }


@hookimpl
def engine_advantages() -> Mapping[str, Advantage]:
    whole, tokens = "engine_core.algorithms.advantages:", "engine_core.algorithms.advantages_tokens:"
    baseline = "engine_core.algorithms.advantages_token_baseline:"
    rewards, grouped = frozenset({"rewards"}), frozenset({"rewards", "group_ids"})
    energies = grouped | {"old_log_probs", "sum_pi_squared"}
    return {
        "batch_mean": Advantage(load=whole + "batch_mean", needs=rewards),
        "dr_grpo": Advantage(load=whole + "dr_grpo"),
        "gae": Advantage(
            load=tokens + "gae",
            config=GAEOptions,
            needs=rewards | {"values"},
            makes=frozenset({"advantages", "returns"}),
        ),
        "gdpo": Advantage(
            load=whole + "gdpo", config=GDPOOptions, needs=frozenset({"reward_terms", "group_ids"})
        ),
        "gpg": Advantage(load=whole + "gpg", config=GPGOptions),
        "grpo": Advantage(load=whole + "grpo", config=GRPOOptions),
        "grpo_passk": Advantage(load=whole + "grpo_passk", config=GRPOPassKOptions),
        "opo": Advantage(load=whole + "opo", needs=grouped | {"response_lengths"}),
        "optimal_token_baseline": Advantage(load=baseline + "optimal_token_baseline", needs=energies),
        "optimal_token_baseline_multi_turn": Advantage(
            load=baseline + "optimal_token_baseline_multi_turn", needs=energies
        ),
        "reinforce": Advantage(load=tokens + "reinforce", config=RewardToGoOptions, needs=rewards),
        "reinforce_plus_plus": Advantage(
            load=tokens + "reinforce_plus_plus", config=RewardToGoOptions, needs=rewards
        ),
        "reinforce_plus_plus_baseline": Advantage(load=whole + "reinforce_plus_plus_baseline"),
        "remax": Advantage(load=tokens + "remax", needs=rewards | {"greedy_rewards"}),
        "rloo": Advantage(load=whole + "rloo"),
    }


@hookimpl
def engine_stages() -> Mapping[str, Stage]:
    return {
        "dynamic_sampling": Stage(
            load="engine_core.algorithms.stages:dynamic_sampling", config=DynamicSamplingOptions
        ),
        "pf_ppo_resample": Stage(load="engine_core.algorithms.stages:pf_ppo_resample", config=PFPPOOptions),
    }


@hookimpl
def engine_losses() -> Mapping[str, Loss]:
    return {"ppo_clip": Loss(load="engine_core.algorithms.losses:ppo_clip", config=PPOClipOptions)}


@hookimpl
def engine_trackers() -> Mapping[str, TrackerSpec]:
    return {
        "tensorboard": TrackerSpec(load="engine_core.trackers:TensorBoard", config=TensorBoardOptions),
        "wandb": TrackerSpec(load="engine_core.trackers:Wandb", config=WandbOptions),
    }


@hookimpl
def engine_trainers() -> Mapping[str, TrainerSpec]:
    return {
        "rl": TrainerSpec(
            load="engine_core.trainer:Trainer",
            sections=SHARED | ROLLOUTS | {"ref", "algorithm"},
            required=frozenset({"reward", "data"}),
        ),
        "sft": TrainerSpec(
            load="engine_core.trainers.sft:SFTTrainer",
            config=SFTOptions,
            sections=SHARED | {"sft"},
            required=frozenset({"data"}),
        ),
    }


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    return {"local": RuntimeSpec(load="engine_core.runtime.local:LocalRuntime", config=LocalOptions)}
