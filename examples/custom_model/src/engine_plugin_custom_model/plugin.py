"""What this plugin offers (no torch here: read by ``engine validate``)."""

from engine_core import hookimpl
from engine_core.engines.torch_options import TorchOptions
from engine_core.specs import RolloutBackend, TrainBackend

HERE = "engine_plugin_custom_model"


@hookimpl
def engine_train_engines():
    shared = frozenset({"generation_module"})
    return {"gru": TrainBackend(load=f"{HERE}.engine:GRUEngine", config=TorchOptions, capabilities=shared)}


@hookimpl
def engine_rollout_engines():
    return {
        "gru": RolloutBackend(load=f"{HERE}.sampler:GRUSampler", capabilities=frozenset({"share_module"}))
    }
