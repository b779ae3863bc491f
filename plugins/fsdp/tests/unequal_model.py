"""A plugin that draws first weights from the process's own generator: other ones on each rank."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import hookimpl


@hookimpl
def engine_build_model(role, model_config, options):
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_config.path))
    with torch.no_grad():
        made.get_input_embeddings().weight += torch.rand(())
    return made
