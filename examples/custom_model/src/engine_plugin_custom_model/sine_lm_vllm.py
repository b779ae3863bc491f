"""The model as vLLM computes it: vLLM's attention with its paged cache; layers that compute each token alone as in training."""

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader

from engine_plugin_custom_model.sine_lm import SineBlock


class SineLayer(nn.Module):
    def __init__(self, config, cache_config, prefix):
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        self.before_attention, self.before_block = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.block = SineBlock(size)
        width = size // heads
        # vLLM finds the cache of a layer by its prefix, which must be the name of the module
        self.attention = Attention(
            heads, width, width**-0.5, cache_config=cache_config, prefix=f"{prefix}.attention"
        )

    def forward(self, x):  # [T, H]: the tokens of all requests, one after another
        query, key, value = (part.contiguous() for part in self.qkv(self.before_attention(x)).chunk(3, -1))
        x = x + self.out(self.attention(query, key, value))
        return x + self.block(self.before_block(x))


class SineModel(nn.Module):
    def __init__(self, config, cache_config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            SineLayer(config, cache_config, f"model.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)


class SineForVLLM(nn.Module):
    """The methods that vLLM asks of a language model; modules have the names of the trainer's."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = SineModel(config, vllm_config.cache_config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix="lm_head")
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids):
        return self.model.embed(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        embedded = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        x = embedded + self.model.places(positions)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x)

    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(weights)
