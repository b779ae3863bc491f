"""``plugins = ["sine_lm"]``: every train engine trains the model; ``hf`` and ``vllm`` sample from it."""

from engine_core import hookimpl


@hookimpl
def engine_build_model(role, model_config):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine_plugin_custom_model.sine_lm import register

    register()
    path, override = model_config.path, model_config.override
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **override)
    except OSError:  # a folder without weights
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model_config.seed)
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, **override))


@hookimpl
def engine_register_model(sampler):
    if sampler != "vllm":
        return None
    from vllm import ModelRegistry

    from engine_plugin_custom_model.sine_lm import register
    from engine_plugin_custom_model.sine_lm_vllm import SineForVLLM

    register()
    ModelRegistry.register_model("SineForVLLM", SineForVLLM)
    return {"architectures": ["SineForVLLM"]}


@hookimpl
def engine_map_weights(weights):
    return weights  # the names of SineForVLLM are those of the trainer's model
