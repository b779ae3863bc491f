"""Models of megatron-core compute what transformers computes: logits, and all gradients, in float32."""

import pytest

LAYOUTS = {
    "dp2": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2_vp2": {"pp": 2, "vp": 2},
}
FOUR = {
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_sp_pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tp2_sp_pp2_vp2": {"tp": 2, "pp": 2, "vp": 2, "sequence_parallel": True},
    "pp4": {"pp": 4},
    "tp4_of_two_groups": {"tp": 4, "sequence_parallel": True},
}
EXPERTS = {"ep2": {"ep": 2}, "tp2_sp": {"tp": 2, "sequence_parallel": True}, "pp2": {"pp": 2}}
EXPERTS_ON_FOUR = {
    "tp2_ep2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "pp2_ep2": {"pp": 2, "ep": 2},
    "ep4": {"ep": 4},
    "ep2": {"ep": 2},
}
FAST = {("tp2", "qwen2", False), ("tp2_sp", "qwen3", True), ("pp2_vp2", "llama", True)}


def slow_but(fast, *case):
    return pytest.param(*case, marks=() if case in fast else pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "kind", "tied"),
    [slow_but(FAST, n, k, t) for n in LAYOUTS for k in ("llama", "qwen2", "qwen3") for t in (False, True)],
)
def test_a_layout_of_two_ranks_computes_as_transformers(two_ranks, layout, kind, tied):
    two_ranks("computes_as_transformers", kind=kind, model={"tie_word_embeddings": tied}, **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("layout", FOUR)
def test_a_layout_of_four_ranks_computes_as_transformers(four_ranks, layout, kind, tied):
    four_ranks("computes_as_transformers", kind=kind, model={"tie_word_embeddings": tied}, **FOUR[layout])


@pytest.mark.parametrize(
    ("layout", "normed"),
    [
        slow_but({("ep2", True), ("tp2_sp", False)}, name, normed)
        for name in EXPERTS
        for normed in (False, True)
    ],
)
def test_experts_compute_as_in_transformers(two_ranks, layout, normed):
    two_ranks(
        "computes_as_transformers", kind="qwen3_moe", model={"norm_topk_prob": normed}, **EXPERTS[layout]
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mixtral", "ep2"),
        pytest.param("mixtral", "tp2_sp", marks=pytest.mark.slow),
        ("seed_oss", "tp2_sp"),
        ("smollm3", "pp2"),
        pytest.param("smollm3", "tp2", marks=pytest.mark.slow),
    ],
)
def test_relatives_of_llama_compute_as_in_transformers(two_ranks, kind, layout):
    two_ranks("computes_as_transformers", kind=kind, **{**LAYOUTS, **EXPERTS}[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERTS_ON_FOUR)
def test_experts_on_four_ranks_compute_as_in_transformers(four_ranks, layout):
    model = {"norm_topk_prob": True, "tie_word_embeddings": True}
    four_ranks("computes_as_transformers", kind="qwen3_moe", model=model, **EXPERTS_ON_FOUR[layout])


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "llama3",
            "rope_theta": 5e3,
            "factor": 8.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=["llama3", "linear"],
)
def test_rotary_positions_are_those_of_transformers(two_ranks, rope):
    two_ranks("a_rectangle_computes_as_its_rows", kind="llama", model={"rope_parameters": rope}, tp=2)


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.slow), "tp2_sp", "pp2_vp2"])
def test_values_of_a_critic_compute_as_in_transformers(two_ranks, layout):
    model = {"tie_word_embeddings": True}
    two_ranks("values_compute_as_in_transformers", kind="qwen3", model=model, **LAYOUTS[layout])


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_bfloat16_is_as_near_the_truth_as_that_of_transformers(two_ranks, kind):
    two_ranks("half_precision_is_that_of_transformers", kind=kind, **LAYOUTS["tp2_sp"])


def test_a_vocabulary_that_ranks_do_not_divide_is_padded_and_nothing_knows_of_it(two_ranks):
    two_ranks("padding_of_the_vocabulary_takes_no_part", kind="llama", model={"vocab_size": 321}, tp=2)


@pytest.mark.slow
def test_padding_that_fills_more_than_one_rank_takes_no_part_either(four_ranks):
    four_ranks(
        "padding_of_the_vocabulary_takes_no_part",
        kind="llama",
        model={"vocab_size": 5, "num_key_value_heads": 4},
        tp=4,
    )


def test_norms_of_sequence_parallel_ranks_need_their_marks(two_ranks):
    two_ranks("a_norm_that_is_not_marked_learns_wrong", kind="llama", tp=2, sequence_parallel=True)


def test_of_a_layouts_groups_the_world_alone_is_left(two_ranks):
    two_ranks("no_group_is_left", tp=2)
