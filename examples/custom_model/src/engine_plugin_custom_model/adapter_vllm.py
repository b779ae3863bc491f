"""The model with adapters as vLLM computes it."""

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from engine_plugin_custom_model.adapter_lm import WithAdapter


class AdapterQwen3(Qwen3ForCausalLM):
    """Its load_weights finds the weights by the names of the trainer's model, since modules have the same names."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.mlp = WithAdapter(layer.mlp, self.config.hidden_size)
