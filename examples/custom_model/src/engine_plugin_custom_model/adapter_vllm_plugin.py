"""``plugins = ["adapter_lm", "adapter_vllm"]``: vLLM computes the adapters itself, as the trainer does."""

from engine_core import hookimpl


@hookimpl
def engine_register_model(sampler):
    if sampler != "vllm":
        return None
    from vllm import ModelRegistry

    from engine_plugin_custom_model.adapter_vllm import AdapterQwen3

    ModelRegistry.register_model("AdapterQwen3", AdapterQwen3)
    return {"architectures": ["AdapterQwen3"]}


@hookimpl
def engine_map_weights(weights):
    return weights  # the names of AdapterQwen3 are those of the trainer's model
