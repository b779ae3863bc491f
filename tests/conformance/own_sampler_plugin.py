"""A sampler and a train engine of one model of our own; the core's ``torch`` cannot build that model."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from engine_core import hookimpl
from engine_core.contracts.engines import RolloutEngine
from engine_core.specs import RolloutBackend, TrainBackend
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "examples" / "backends")]

from custom_model_plugin import load
from plain_rollout import PlainRollout


class Engine(TorchEngine):
    def _build_model_optimizer(self, *, model_path, **_):
        return load(model_path).float()


class Sampler(PlainRollout):
    def __init__(self, config, model_config, context):
        RolloutEngine.__init__(self, config, model_config, context)
        self.tokenizer = context.live["tokenizer"]
        self.module = load(model_config.path).float().to(context.device)
        written = json.loads((Path(model_config.path) / "config.json").read_text())
        self.module.config = SimpleNamespace(**written)
        self.module.register_forward_pre_hook(with_positions, with_kwargs=True)
        self.module.register_forward_hook(lambda module, inputs, logits: SimpleNamespace(logits=logits))
        self.queue, self.whole = {}, True


def with_positions(module, inputs, arguments):
    ids = arguments["input_ids"]
    return inputs, {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None], **arguments}


@hookimpl
def engine_train_engines():
    return {"mean": TrainBackend(load=Engine, config=TorchOptions)}


@hookimpl
def engine_rollout_engines():
    return {"mean": RolloutBackend(load=Sampler)}
