"""What does not divide is told with its key and the nearest number that does, before megatron-core is asked."""

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from engine_plugin_megatron.layout import MeshLayout, misfits

SHAPE = {
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
}


def told(layout, config=None, **options):
    return misfits(Qwen3Config(**SHAPE) if config is None else config, layout, **options)


@pytest.mark.parametrize(
    "layout", [MeshLayout(), MeshLayout(tp=4), MeshLayout(tp=12), MeshLayout(pp=3, vp=2)]
)
def test_what_fits_is_let_through(layout):
    assert told(layout) == []


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (MeshLayout(tp=3), ["tp is 3", "12 heads with 4 heads of keys", "Set it to 2 (one of 1, 2, 4, 12)."]),
        (MeshLayout(tp=8), ["tp is 8", "Set it to 4"]),
        (MeshLayout(pp=5), ["pp is 5", "12 layers", "Set it to 4 (one of 1, 2, 3, 4, 6, 12)."]),
        (MeshLayout(pp=2, vp=4), ["virtual_pp is 4", "6 layers of a stage", "Set it to 3"]),
        (MeshLayout(ep=2), ["ep is 2, and 'qwen3' has no experts. Set it to 1."]),
        (MeshLayout(cp=5), ["cp is 5", "12 heads.", "Set it to 4 (one of 1, 2, 3, 4, 6, 12)."]),
        (MeshLayout(tp=2, cp=4), ["cp is 4", "12 heads, of which tp 2 leaves 6 to each rank", "Set it to 3"]),
    ],
)
def test_what_does_not_is_refused_with_what_would(layout, words):
    (line,) = told(layout)
    for word in words:
        assert word in line


def test_experts_ask_for_more():
    config = Qwen3MoeConfig(**SHAPE, num_experts=6, moe_intermediate_size=18)
    lines = told(MeshLayout(tp=4, ep=4), config)
    assert [line.split(",")[0] for line in lines] == [
        "tp is 4",
        "ep is 4",
        "tp with experts needs sequence_parallel: ranks would route the same tokens each. Set it to true.",
    ]
    assert "a feed-forward of 18 and 96. Set it to 2" in lines[0]
    assert "6 experts. Set it to 3" in lines[1]
    assert told(MeshLayout(tp=2, ep=2), config, sequence_parallel=True) == []


def test_all_that_does_not_fit_is_told_at_once():
    assert len(told(MeshLayout(tp=5, pp=5, ep=3))) == 3
