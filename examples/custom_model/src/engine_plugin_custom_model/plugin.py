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
    load = f"{HERE}.engine:GRUEngine"
    return {"gru": TrainBackend(load=load, config=GRUOptions, capabilities=kept, own_model=True)}


@hookimpl
def engine_rollout_engines():
    able = frozenset({"share_module", "custom_model"})
    load = f"{HERE}.sampler:GRUSampler"  # it samples from all tokens
    options = frozenset({"temperature", "max_response_tokens", "stop", "stop_token_ids"})
    return {"gru": RolloutBackend(load=load, capabilities=able, sampling=options)}


@hookimpl
def engine_build_model(role, model_config):
    """The model of a sampler with separate weights, in any process; that of the other roles GRUEngine builds."""
    if role != "rollout":
        return None
    from engine_plugin_custom_model.engine import build

    return build(model_config.path, model_config.override, model_config.seed)[0]
