"""The speed of a sampler before it is built."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, MambaConfig, Qwen3Config

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.contracts.memory import MemoryQuestion
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.memory_need import LAYER
from engine_plugin_hf_rollout.plugin import HFOptions

CONFIG = Qwen3Config(
    vocab_size=100, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
)  # fmt: skip


def need_of(folder, config):
    config.save_pretrained(folder)
    rollout = RolloutConfig(options=HFOptions(batch_size=7))
    return HFRolloutEngine.memory_need(rollout, ModelConfig(path=str(folder)), MemoryQuestion("rollout"))


def test_the_speed_is_known_and_the_memory_is_not(tmp_path):
    need = need_of(tmp_path, CONFIG)
    count = sum(p.numel() for p in AutoModelForCausalLM.from_config(CONFIG).parameters())
    assert need.unknown == ("all",)
    assert (need.kept, need.idle, need.working) == ({}, {}, {})
    assert need.speed.weights == 2 * count
    assert need.speed.token == 2 * 3 * 8 * 2  # keys and values, layers, size, bfloat16
    assert need.speed.together == 7
    assert need.speed.step == 3 * LAYER
    assert need.speed.update == 0


def test_a_model_that_is_no_dense_decoder_has_no_speed(tmp_path):
    assert need_of(tmp_path, MambaConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2)) is None
