"""Weights come back as they were, to the bit, whatever the layout."""

import pytest

LAYOUTS = {
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2_vp2": {"pp": 2, "vp": 2},
    "ep2": {"ep": 2},
    "tp2_pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tp4": {"tp": 4, "sequence_parallel": True},
    "tp2_ep2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "pp2_ep2": {"pp": 2, "ep": 2},
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in ("qwen2", "qwen3_moe") for layout in ("tp2_sp", "pp2_vp2")]
    + [("qwen3_moe", "ep2")],
)
def test_weights_are_loaded_gathered_and_sliced_exactly(two_ranks, kind, layout):
    two_ranks("loads_and_streams_exactly", kind=kind, model={"vocab_size": 321}, **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", ["tp2_pp2", "tp4", "tp2_ep2", "pp2_ep2"])
def test_weights_on_four_ranks_are_loaded_gathered_and_sliced_exactly(four_ranks, layout, tied):
    model = {"vocab_size": 321, "tie_word_embeddings": tied}
    four_ranks("loads_and_streams_exactly", kind="qwen3_moe", model=model, **LAYOUTS[layout])


def test_a_share_of_new_weights_is_mixed_in(two_ranks):
    two_ranks("mixes_what_is_loaded", kind="qwen2", tp=2)


def test_a_tensor_of_another_shape_is_refused_by_name(two_ranks):
    two_ranks("refuses_another_shape", kind="llama", tp=2)
