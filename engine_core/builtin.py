"""The core's own names, offered through the same hooks as a stranger's.

Only strings and option models here: what is named is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.algorithms.options import GRPOOptions, PPOClipOptions
from engine_core.engines.torch_options import TorchOptions
from engine_core.hookspecs import hookimpl
from engine_core.runtime.options import LocalOptions
from engine_core.specs import Advantage, Loss, RuntimeSpec, TrackerSpec, TrainBackend, TrainerSpec
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
            capabilities=frozenset({"generation_module"}),
        )
    }


@hookimpl
def engine_advantages() -> Mapping[str, Advantage]:
    return {"grpo": Advantage(load="engine_core.algorithms.advantages:grpo", config=GRPOOptions)}


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
