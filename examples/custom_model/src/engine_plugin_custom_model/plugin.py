"""What this plugin offers (no torch here: read by ``engine validate``)."""

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import RolloutBackend, TrainBackend
from engine_plugin_torch.options import TorchOptions

HERE = "engine_plugin_custom_model"


class GRUOptions(TorchOptions):
    embedding_rate: float = Field(default=0.25, gt=0, le=1)
    """Learning rate of the embedding, as a share of that of the layers."""


@hookimpl
def engine_train_engines():
    kept = frozenset({"generation_module", "set_lr"})
    return {"gru": TrainBackend(load=f"{HERE}.engine:GRUEngine", config=GRUOptions, capabilities=kept)}


@hookimpl
def engine_rollout_engines():
    return {
        "gru": RolloutBackend(load=f"{HERE}.sampler:GRUSampler", capabilities=frozenset({"share_module"}))
    }
