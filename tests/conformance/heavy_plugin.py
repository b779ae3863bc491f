"""A plugin whose hooks cannot be read without torch: what the contract on imports is for."""

import torch  # noqa: F401

from engine_core import hookimpl
from engine_core.specs import TrainBackend


@hookimpl
def engine_train_engines():
    return {"heavy": TrainBackend(load="engine_plugin_torch.engine:TorchEngine")}
