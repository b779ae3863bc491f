"""Shapes and the cost of a token, against published figures."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core.errors import ConfigError
from engine_plugin_tools.bench.shapes import DENSE_BF16_FLOPS, SHAPES, Cost, flops_of, write_shape

PUBLISHED = {"qwen3-0.6b": 0.596e9, "qwen3-1.7b": 1.72e9, "qwen3-4b": 4.02e9, "qwen3-8b": 8.19e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_weights(tmp_path, name):
    config = AutoConfig.from_pretrained(write_shape(name, tmp_path / name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PUBLISHED[name], rel=0.01)
    cost = Cost.of(config.to_dict())
    matrices = sum(p.numel() for name, p in model.model.layers.named_parameters() if p.ndim == 2)
    assert (cost.body, cost.head) == (matrices, model.lm_head.weight.numel())


def test_the_cost_of_a_token_is_the_one_that_others_publish_their_mfu_with():
    """prime-rl: Qwen3-0.6B, 16k tokens a sequence, 11.90k tokens a second on an H100 are 11.1% MFU."""
    cost = Cost.of(SHAPES["qwen3-0.6b"])
    a_token = cost.train([16384], 16384) / 16384
    assert a_token * 11.90e3 / flops_of("NVIDIA H100 80GB HBM3") == pytest.approx(0.111, abs=0.001)


def test_sequences_cost_attention_to_themselves_only():
    cost = Cost(body=0, head=0, attention=1)
    assert cost.train([10, 20], 0) == 6 * (100 + 400)


def test_models_that_the_formula_does_not_fit_have_no_cost():
    assert Cost.of({"hidden_size": 8}) is None
    assert Cost.of({**SHAPES["tiny"], "n_routed_experts": 8}) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
    ],
)
def test_a_device_is_known_by_its_name(name, expected):
    assert flops_of(name) == DENSE_BF16_FLOPS[expected]


def test_the_rate_of_an_unknown_device_is_not_guessed():
    assert flops_of("cpu") is None
    assert flops_of("AMD Instinct MI300X") is None


def test_an_unknown_shape_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match=r"'qwen3-0.8b' is not known. Did you mean 'qwen3-0.6b'"):
        write_shape("qwen3-0.8b", tmp_path)


def test_a_shape_is_a_folder_without_weights(tmp_path):
    write_shape("tiny", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 64
