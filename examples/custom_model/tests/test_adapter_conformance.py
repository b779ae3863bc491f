"""The conformance kit on the ordinary model with adapters: how its folder is written, and what it is compared with."""

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine_plugin_custom_model.adapter_lm import add_adapters
from engine_plugin_testing import TrainEngineSuite


def make(config):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    add_adapters(model)
    return model


def write(folder, model, seed, tied):
    """write_model: random weights, also where a new adapter has zeros, and norms around 1."""
    torch.manual_seed(seed)
    made = make(AutoConfig.for_model(**model))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.2)
    made.save_pretrained(folder)


def load(path):
    """reference: the module of a folder, in float64."""
    module = make(AutoConfig.from_pretrained(path))
    module.load_state_dict(
        load_file(f"{path}/model.safetensors"), strict=False
    )  # a tied head is not in the file
    return module.double()


class TestAdapterLM(TrainEngineSuite):
    backend = "torch"
    plugins = ["adapter_lm"]
    write_model = "test_adapter_conformance.py:write"
    reference = "test_adapter_conformance.py:load"
    unsupported = {"test_export_is_loaded_by_from_pretrained": "transformers does not have the adapters"}
