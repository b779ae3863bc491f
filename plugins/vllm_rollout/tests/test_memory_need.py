"""The memory of a sampler before vLLM is started; vLLM itself is not needed."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from engine_core.config import ModelConfig
from engine_core.contracts.memory import MemoryQuestion
from engine_plugin_vllm_rollout.memory_need import GRAPHS, SLACK, memory_need
from engine_plugin_vllm_rollout.plugin import VLLMOptions

GIB = 2**30
CONFIG = Qwen3Config(
    vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
TOKEN = 2 * 4 * 2 * 64 * 2  # keys and values, layers, heads, size, bfloat16


@pytest.fixture
def need_of(tmp_path):
    CONFIG.save_pretrained(tmp_path)

    def need(sequences=64, length=1024, free=None, device=24, **options):
        made = VLLMOptions.model_construct(**{"gpu_memory_utilization": "auto", **options})
        question = MemoryQuestion(
            "rollout", device_bytes=int(device * GIB), free=free, sequences=sequences, length=length
        )
        return memory_need(made, ModelConfig(path=str(tmp_path)), question)

    return need


def test_weights_are_those_of_the_model_in_its_type(need_of):
    count = sum(p.numel() for p in AutoModelForCausalLM.from_config(CONFIG).parameters())
    assert need_of().kept["weights"] == 2 * count
    assert need_of(dtype="float32").kept["weights"] == 4 * count
    assert need_of(tensor_parallel_size=2).kept["weights"] == count


def test_a_chosen_share_holds_a_sequence_for_each_response(need_of):
    need = need_of()
    wanted = 64 * 1024 * TOKEN
    share = need.chosen["vllm.gpu_memory_utilization"]
    held = sum((*need.kept.values(), *need.working.values()))
    assert share * 24 * GIB >= held + wanted + SLACK
    assert (share - 0.005) * 24 * GIB < held + wanted + SLACK
    assert need.idle["cache"] == int(share * 24 * GIB) - held


def test_no_more_sequences_than_vllm_decodes_at_once_count(need_of):
    few, many = need_of(sequences=1024, max_num_seqs=64), need_of(sequences=64, max_num_seqs=64)
    assert few.idle == many.idle


def test_the_share_shrinks_with_what_the_trainer_leaves_but_holds_one_sequence(need_of):
    wide = need_of(sequences=4096, length=4096, max_num_seqs=4096, free=12 * GIB)
    total = sum((*wide.kept.values(), *wide.idle.values(), *wide.working.values()))
    assert 12 * GIB - 0.005 * 24 * GIB <= total <= 12 * GIB
    scarce = need_of(sequences=1, length=64, free=0)
    assert scarce.idle["cache"] >= 4096 * TOKEN


def test_a_share_of_what_is_free_is_rounded_down_and_a_judge_gets_the_default(need_of, tmp_path):
    need = need_of(sequences=4096, length=4096, max_num_seqs=4096, free=10 * GIB + 12345)
    assert need.chosen["vllm.gpu_memory_utilization"] * 24 * GIB <= 10 * GIB + 12345
    question = MemoryQuestion("judge", device_bytes=24 * GIB)
    judge = memory_need(
        VLLMOptions.model_construct(gpu_memory_utilization="auto"), ModelConfig(path=str(tmp_path)), question
    )
    assert judge.chosen == {}
    assert sum((*judge.kept.values(), *judge.idle.values(), *judge.working.values())) == 12 * GIB


def test_a_share_of_the_user_is_taken_whole(need_of):
    need = need_of(gpu_memory_utilization=0.5)
    total = sum((*need.kept.values(), *need.idle.values(), *need.working.values()))
    assert total == 12 * GIB
    assert need.chosen == {}


def test_bytes_of_cache_of_the_user_are_taken(need_of):
    need = need_of(kv_cache_memory_bytes=GIB)
    assert need.idle == {"cache": GIB}


def test_an_8_bit_cache_has_half_the_bytes_and_eager_code_no_graphs(need_of):
    plain, half = need_of(free=0, sequences=1), need_of(free=0, sequences=1, kv_cache_dtype="fp8")
    assert plain.kept["graphs"] == GRAPHS
    assert need_of(enforce_eager=True).kept["graphs"] == 0
    assert half.idle["cache"] <= plain.idle["cache"]


def test_what_sleeps_is_what_the_level_frees(need_of):
    assert need_of(sleep_level=0).idle == {}
    assert set(need_of(sleep_level=1).idle) == {"cache"}
    assert set(need_of(sleep_level=2).idle) == {"weights", "cache"}


def test_a_decode_step_reads_the_weights_and_the_cache_of_its_sequences(need_of):
    need = need_of(max_num_seqs=32)
    assert need.speed.weights == need.kept["weights"]
    assert need.speed.token == TOKEN
    assert need.speed.together == 32
    assert need_of(kv_cache_dtype="fp8").speed.token == TOKEN // 2


@pytest.mark.parametrize(
    "options", [{"enforce_eager": True}, {"tensor_parallel_size": 2}, {"dtype": "float32"}]
)
def test_options_that_were_not_measured_have_no_speed(need_of, options):
    assert need_of(**options).speed is None
