"""Random weights made where they are used: what the engine would draw on the CPU takes minutes for billions of weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import hookimpl

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@hookimpl
def engine_build_model(role, model_config, options):
    config = AutoConfig.from_pretrained(model_config.path)
    dtype = DTYPES.get(options.param_dtype, torch.float32)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    torch.manual_seed(model_config.seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=model_config.attention, dtype=dtype
        )
