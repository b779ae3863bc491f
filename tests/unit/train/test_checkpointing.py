"""Checks of a checkpoint before any model is built."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from engine_core.contracts.runtime import Role
from engine_core.data import tokenizer_hash
from engine_core.errors import ConfigError
from engine_core.train.checkpointing import Resume
from engine_plugin_torch.shards import experts_apart


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj", False),
        ("model.layers.0.mlp.up_proj.weight", None),
    ],
)
def test_how_a_checkpoint_holds_experts_is_read_off_its_names(tmp_path, name, apart):
    save_file({name: torch.zeros(2), "model.norm.weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    (tmp_path / "state.json").write_text(json.dumps({"format": 1}))
    assert experts_apart(tmp_path) is apart


def test_a_format_of_another_engine_is_not_looked_into(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"format": "own"}))
    assert experts_apart(tmp_path) is None
    assert experts_apart(tmp_path / "absent") is None


def test_a_reference_that_followed_the_actor_is_not_reset_silently(tmp_path, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    (tmp_path / "ref").mkdir()
    resume = Resume(tmp_path, {"tokenizer": tokenizer_hash(tokenizer)})
    resume.check_inputs(tokenizer, {"ref": Role("train", trainable=False, refreshed=True)})
    with pytest.raises(
        ConfigError, match=r"ref_refresh_steps: got 0, but the reference of .* has followed the actor"
    ):
        resume.check_inputs(tokenizer, {"ref": Role("train", trainable=False)})
