"""Updates by layer, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from engine_plugin_tools.layer_updates import compare_updates

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.2.a",
    "model.layers.2.b",
    "model.layers.10.a",
    "lm_head.weight",
]


def write(folder, changes):
    """Write weights before and after; a weight without a change stays as it is. They lie in two files."""
    for name, share in (("before", 0.0), ("after", 1.0)):
        (folder / name).mkdir(parents=True)
        weights = {
            each: torch.ones(2) + share * torch.tensor(changes.get(each, [0.0, 0.0])) for each in NAMES
        }
        save_file({each: weights[each] for each in NAMES[:2]}, folder / name / "model-1.safetensors")
        save_file({each: weights[each] for each in NAMES[2:]}, folder / name / "model-2.safetensors")
    return folder


@pytest.fixture
def rows(tmp_path):
    first = write(tmp_path / "first", {"model.layers.2.a": [3.0, 0.0], "model.layers.2.b": [0.0, 4.0]})
    second = write(tmp_path / "second", {"model.layers.2.a": [3.0, 0.0], "model.layers.10.a": [1.0, 0.0]})
    return compare_updates(first, second)


def test_layers_are_in_the_models_order_by_number(rows):
    names = ["model.embed_tokens.weight", "model.layers.2", "model.layers.10", "lm_head.weight"]
    assert [row.name for row in rows] == names


def test_a_layers_update_is_that_of_all_its_weights(rows):
    assert [row.size for row in rows] == [0.0, 5.0, 0.0, 0.0]
    assert [row.other for row in rows] == [0.0, 3.0, 1.0, 0.0]
    assert [row.difference for row in rows] == [0.0, 4.0, 1.0, 0.0]


def test_the_share_is_of_the_larger_update_and_nothing_where_nothing_moves(rows):
    assert [row.share for row in rows] == [0.0, 0.8, 1.0, 0.0]
