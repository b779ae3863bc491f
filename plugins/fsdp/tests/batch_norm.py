"""A plugin whose model has a norm over sequences."""

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import hookimpl


@hookimpl
def engine_build_model(role, model_config, options):
    config = AutoConfig.from_pretrained(model_config.path)
    made = AutoModelForCausalLM.from_config(config)
    layer = made.get_decoder().layers[0]
    layer.mlp = nn.Sequential(layer.mlp, nn.BatchNorm1d(config.hidden_size))
    return made
