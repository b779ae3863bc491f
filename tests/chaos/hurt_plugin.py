"""A plugin in one file for tests with several ranks: a reward, and engines that hurt their own process (`hurt_engines.py`)."""

import sys
from pathlib import Path

from engine_core import hookimpl
from engine_core.specs import Reward, RolloutBackend, TrainBackend
from engine_plugin_fsdp.options import FSDPOptions
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_torch.options import TorchOptions

sys.path.insert(0, str(Path(__file__).parent))


def bytes_share(completions):
    return [sum(c.isascii() for c in text) / max(len(text), 1) for text in completions]


@hookimpl
def engine_rewards():
    return {"bytes_share": Reward(load=bytes_share)}


@hookimpl
def engine_train_engines():
    spec = TrainBackend(
        load="hurt_engines:HurtTrain", config=TorchOptions, capabilities=frozenset({"set_lr"})
    )
    abilities = frozenset({"generation_module", "set_lr"})
    sharded = TrainBackend(load="hurt_engines:HurtFSDP", config=FSDPOptions, capabilities=abilities)
    return {"hurt": spec, "hurt_fsdp": sharded}


@hookimpl
def engine_rollout_engines():
    spec = RolloutBackend(
        load="hurt_engines:HurtSampler", config=HFOptions, capabilities=frozenset({"share_module"})
    )
    return {"hurt": spec}
