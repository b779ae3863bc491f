"""The core's own names, offered through the same hooks as a stranger's.

Only strings and option models here: what is named is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from engine_core.algorithms.advantage_options import (
    DistillAdvantageOptions,
    GAEOptions,
    GDPOOptions,
    GPGOptions,
    GRPOOptions,
    GRPOPassKOptions,
    RewardToGoOptions,
)
from engine_core.algorithms.columns import COLUMNS
from engine_core.algorithms.loss_options import (
    CISPOOptions,
    DPPOKLOptions,
    DPPOTVOptions,
    DROOptions,
    GMPOOptions,
    GSPOOptions,
    PPOClipOptions,
    SAPOOptions,
    VESPOOptions,
)
from engine_core.algorithms.stage_options import DynamicSamplingOptions, PFPPOOptions
from engine_core.hooks import hookimpl
from engine_core.local.options import LocalOptions
from engine_core.specs import (
    SAMPLING_SECTIONS,
    SHARED_SECTIONS,
    Advantage,
    Column,
    Command,
    Loss,
    Objective,
    RuntimeSpec,
    Stage,
    TrainerSpec,
    TransportSpec,
)


@hookimpl
def engine_advantages() -> Mapping[str, Advantage]:
    whole, tokens = "engine_core.algorithms.advantages:", "engine_core.algorithms.advantages_tokens:"
    rewards, grouped = frozenset({"rewards"}), frozenset({"rewards", "group_ids"})
    compared = partial(Advantage, min_group_size=2)
    return {
        "batch_mean": Advantage(load=whole + "batch_mean", needs=rewards),
        "distill": Advantage(
            load=tokens + "distill",
            config=DistillAdvantageOptions,
            needs=frozenset({"old_log_probs", "teacher_log_probs"}),
        ),
        "dr_grpo": compared(load=whole + "dr_grpo"),
        "gae": Advantage(
            load=tokens + "gae",
            config=GAEOptions,
            needs=rewards | {"values"},
            makes=frozenset({"advantages", "returns"}),
        ),
        "gdpo": compared(
            load=whole + "gdpo", config=GDPOOptions, needs=frozenset({"reward_terms", "group_ids"})
        ),
        "gpg": compared(load=whole + "gpg", config=GPGOptions),
        "grpo": compared(load=whole + "grpo", config=GRPOOptions),
        "grpo_passk": compared(load=whole + "grpo_passk", config=GRPOPassKOptions),
        "opo": compared(load=whole + "opo", needs=grouped | {"response_lengths"}),
        "reinforce": Advantage(load=tokens + "reinforce", config=RewardToGoOptions, needs=rewards),
        "reinforce_plus_plus": Advantage(
            load=tokens + "reinforce_plus_plus", config=RewardToGoOptions, needs=rewards
        ),
        "reinforce_plus_plus_baseline": compared(load=whole + "reinforce_plus_plus_baseline"),
        "remax": Advantage(load=tokens + "remax", needs=rewards | {"greedy_rewards"}),
        "rloo": compared(load=whole + "rloo"),
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
    token, sequence = "engine_core.algorithms.losses:", "engine_core.algorithms.losses_sequence:"
    of_rollout = "seq-mean-token-mean"
    return {
        "cispo": Loss(load=token + "cispo", config=CISPOOptions),
        "dppo_kl": Loss(load=token + "dppo_kl", config=DPPOKLOptions),
        "dppo_tv": Loss(load=token + "dppo_tv", config=DPPOTVOptions),
        "dro": Loss(load=token + "dro", config=DROOptions, ratio=False),
        "gmpo": Loss(load=sequence + "gmpo", config=GMPOOptions, aggregation=of_rollout),
        "gspo": Loss(load=sequence + "gspo", config=GSPOOptions, aggregation=of_rollout),
        "luspo": Loss(load=sequence + "luspo", config=GSPOOptions, aggregation="seq-mean-token-sum"),
        "ppo_clip": Loss(load=token + "ppo_clip", config=PPOClipOptions),
        "reinforce": Loss(load=token + "reinforce", ratio=False),
        "sapo": Loss(load=token + "sapo", config=SAPOOptions, aggregation=of_rollout),
        "vespo": Loss(load=sequence + "vespo", config=VESPOOptions),
    }


@hookimpl
def engine_trainers() -> Mapping[str, TrainerSpec]:
    return {
        "rl": TrainerSpec(
            load="engine_core.train.trainer:Trainer",
            sections=SHARED_SECTIONS | SAMPLING_SECTIONS | {"ref", "critic", "teacher", "algorithm"},
            required=frozenset({"reward", "data"}),
        )
    }


@hookimpl
def engine_objectives() -> Mapping[str, Objective]:
    here = "engine_core.algorithms.objectives:"
    return {
        "nll": Objective(load=here + "nll"),
        "policy": Objective(load=here + "make_policy", factory=True),
        "value": Objective(load=here + "value_objective"),
    }


@hookimpl
def engine_columns() -> Mapping[str, Column]:
    return COLUMNS


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    return {
        "local": RuntimeSpec(
            load="engine_core.local.runtime:LocalRuntime", config=LocalOptions, in_process=True
        )
    }


@hookimpl
def engine_weight_transports() -> Mapping[str, TransportSpec]:
    return {
        "same_process": TransportSpec(
            load="engine_core.contracts.weight_sync:same_process", serves=frozenset({"colocated"})
        )
    }


@hookimpl
def engine_commands() -> Mapping[str, Command]:
    configs, train = "engine_core.cli.configs:", "engine_core.cli.train:"
    return {
        "train": Command(load=train + "train"),
        "resume": Command(load=train + "resume"),
        "validate": Command(load=configs + "validate"),
        "config.show": Command(load=configs + "show", group_help="Look at a configuration."),
        "plugins": Command(load="engine_core.cli.plugins:plugins"),
        "export": Command(load="engine_core.cli.export:export"),
    }
