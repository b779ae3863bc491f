"""Checks of a checkpoint before any model is built."""

import json

import pytest
import torch
from safetensors.torch import save_file

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
