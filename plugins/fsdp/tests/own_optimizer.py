"""A plugin that brings its own optimizer and shards nothing."""

import torch

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_fsdp.engine import FSDPEngine
from engine_plugin_fsdp.options import FSDPOptions


class OwnOptimizer(FSDPEngine):
    def _build_model_optimizer(self, **arguments):
        module = super()._build_model_optimizer(**arguments).to_empty(device="cpu")
        return module, torch.optim.SGD(module.parameters(), lr=arguments["optim_config"].lr), None


@hookimpl
def engine_train_engines():
    return {"own": TrainBackend(load=OwnOptimizer, config=FSDPOptions)}
