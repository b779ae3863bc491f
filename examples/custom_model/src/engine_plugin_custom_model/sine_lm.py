"""A transformers class with layers of our own: attention, and a feed-forward block with a sine in place of an activation."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class SineConfig(PretrainedConfig):
    model_type = "sine_lm"

    def __init__(
        self, vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, **others,
    ):  # fmt: skip
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**others)


class SineBlock(nn.Module):
    """``[..., H] -> [..., H]``, with a frequency that is learned for each unit."""

    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size, bias=False), nn.Linear(2 * size, size, bias=False)
        self.frequency = nn.Parameter(torch.ones(2 * size))

    def forward(self, x):
        h = self.up(x)
        return self.down(h * torch.sin(self.frequency * h))


class SineLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        size = config.hidden_size
        self.index, self.heads = index, config.num_attention_heads
        self.before_attention, self.before_block = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.block = SineBlock(size)

    def forward(self, x, mask, cache):
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.block(self.before_block(x))


class SinePreTrained(PreTrainedModel):
    config_class = SineConfig
    base_model_prefix = "model"  # get_decoder finds the base model by this name
    _input_embed_layer = "embed"  # get_input_embeddings finds it by this name

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.05)


class SineModel(SinePreTrained):
    """The base model: its output has ``last_hidden_state`` [B, T, H]."""

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(SineLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.post_init()

    def forward(
        self, input_ids, position_ids, attention_mask=None, past_key_values=None, use_cache=False, **others
    ):
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if past_key_values is not None and past_key_values.get_seq_length():  # one more token of each row
            mask = attention_mask[:, None, None, :].bool()
        else:  # a sequence begins where the position is 0: packed sequences and padding are kept apart
            sequence, places = (position_ids == 0).cumsum(1), torch.arange(input_ids.shape[1])
            earlier = (places[:, None] >= places).to(input_ids.device)
            mask = (earlier & (sequence[:, :, None] == sequence[:, None, :]))[:, None]
        x = self.embed(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x, mask, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class SineForCausalLM(SinePreTrained, GenerationMixin):
    """Base model and head: the logits are ``lm_head(last_hidden_state)`` and nothing else."""

    def __init__(self, config):
        super().__init__(config)
        self.model = SineModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids, position_ids, attention_mask=None, past_key_values=None, use_cache=False, **others
    ):
        found = self.model(input_ids, position_ids, attention_mask, past_key_values, use_cache)
        return CausalLMOutputWithPast(
            logits=self.lm_head(found.last_hidden_state), past_key_values=found.past_key_values
        )


def register():
    """Let AutoConfig and AutoModelForCausalLM read folders of this model."""
    AutoConfig.register("sine_lm", SineConfig, exist_ok=True)
    AutoModelForCausalLM.register(SineConfig, SineForCausalLM, exist_ok=True)
