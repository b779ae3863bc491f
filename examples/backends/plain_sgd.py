"""A train engine: the reference engine with SGD in place of AdamW."""

import torch

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions


class SGDOptions(TorchOptions):
    momentum: float = 0.0
    """Share of the last step that is added to the next."""


class SGDEngine(TorchEngine):
    def _build_model_optimizer(self, *, optim_config, **arguments):
        module = super()._build_model_optimizer(optim_config=optim_config, **arguments)
        if optim_config is None:  # a reference model is not trained
            return module
        module = self._place(module)
        momentum = self.options.momentum
        return module, torch.optim.SGD(module.parameters(), lr=optim_config.lr, momentum=momentum), None


@hookimpl
def engine_train_engines():
    shared = frozenset({"generation_module"})
    return {"plain_sgd": TrainBackend(load=SGDEngine, config=SGDOptions, capabilities=shared)}
