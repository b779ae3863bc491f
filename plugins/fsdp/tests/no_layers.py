"""A plugin whose model has no list of layers."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import hookimpl


@hookimpl
def engine_build_model(role, model_config, options):
    torch.manual_seed(model_config.seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_config.path))
    made.model.layers = nn.Sequential(*made.model.layers)
    return made
