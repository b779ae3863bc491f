"""The axes ``sp`` and ``tp`` of the mesh: one launch of each number of ranks runs all cases of ``mesh_cases``.

The whole kit on ``tp = 2`` and on both axes is in ``test_conformance.py``.
"""

from pathlib import Path

import pytest
from torch import nn

from engine_core.errors import ConfigError
from engine_plugin_fsdp.consistency import Probe
from engine_plugin_fsdp.options import FSDPOptions
from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.launcher import Workers

HERE = Path(__file__).parent


class FSDP(TrainEngineSuite):
    backend = "fsdp"


def case(name):
    return FSDP.contracts[f"test_{name}"].case


GRADIENT = case("the_gradient_is_that_of_the_global_sum")
LOG_PROBS = case("log_probs_equal_the_reference")
NORM = case("the_norm_is_the_same_on_any_number_of_ranks")
RESUME = case("a_resumed_run_continues_exactly")
SLEEP = case("an_engine_that_slept_goes_on_as_if_it_had_not")
WEIGHTS = case("named_weights_follow_a_step")
EXPORT = case("export_is_loaded_by_from_pretrained")
POISON = case("a_gradient_that_is_not_finite_skips_the_step")
SAMPLER = case("the_generation_module_gives_the_logits_of_the_policy")
ADDED = case("gradients_add_up_over_calls")
KEPT = (ADDED, GRADIENT, NORM, RESUME, SLEEP, WEIGHTS, EXPORT, POISON, SAMPLER)


def name_of(value):
    return value.rpartition(":")[2] if isinstance(value, str) else None


@pytest.fixture(scope="module")
def ranks():
    groups = {}

    def run(size, name, options=None, **settings):
        if size not in groups:
            groups[size] = Workers(size, root=HERE)
        name = name if ":" in name else f"mesh_cases.py:{name}"
        groups[size].run(FSDP.bench, name, {**FSDP.settings(), "options": options or {}, **settings})

    yield run
    for group in groups.values():
        group.close()


def slowly(name, value):
    return pytest.param(value, marks=pytest.mark.slow, id=name)


def quickly(name, value):
    return pytest.param(value, id=name)


@pytest.mark.parametrize(
    "options",
    [
        slowly("grad_op", {"sharding": "grad_op"}),
        quickly("none", {"sharding": "none"}),
        slowly("each", {"gradient_sync": "each"}),
        quickly("params_offload", {"cpu_offload": "params"}),
        slowly("full_recompute", {"activation_checkpointing": "full"}),
        quickly("every_second_unit", {"activation_checkpointing": 2, "activation_offload": True}),
        quickly("two_layers_a_unit", {"wrap": {"layers_per_unit": 2}}),
        quickly("inner_units", {"wrap": {"layer_classes": ["Qwen3MLP", "Qwen3Attention"]}}),
        slowly("every_rank_reads", {"loading": "every_rank"}),
    ],
)
@pytest.mark.slow
def test_the_gradient_is_the_same_with_layers_shared(ranks, options):
    ranks(2, GRADIENT, {"tp": 2, **options})


@pytest.mark.parametrize(
    "model",
    [
        quickly("biases", {"model_type": "qwen2"}),
        quickly(
            "biases_of_sums",
            {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
        ),
        slowly("whole_attention", {"model_type": "olmo2"}),
        quickly("fused_projections", {"model_type": "phi3"}),
        slowly("windows", {"model_type": "gemma3_text", "sliding_window": 4}),
    ],
)
@pytest.mark.slow
def test_the_gradient_is_the_same_for_every_plan(ranks, model):
    ranks(2, GRADIENT, {"tp": 2}, model=model)


@pytest.mark.slow
def test_bf16_gives_the_gradient_within_its_rounding_with_layers_shared(ranks):
    # eight bits of mantissa: 2^-8 a product, of which each gradient is a chain of about ten
    options = {"tp": 2, "mixed_precision": {"param_dtype": "bf16"}}
    ranks(2, "cases.py:one_step", options, gradient_tolerance=0.08)


@pytest.mark.parametrize("options", [{"sp": 2}, {"tp": 2}], ids=["sp", "tp"])
@pytest.mark.parametrize("role", ["critic", "reward_model"])
@pytest.mark.slow
def test_a_value_head_learns_as_in_one_process(ranks, options, role):
    ranks(2, "a_value_head_learns_as_alone", options, role=role)


@pytest.mark.parametrize("settings", [{}, {"whole": ["norm"]}], ids=["lora", "whole"])
@pytest.mark.slow
def test_an_adapter_over_shared_layers_learns_as_in_one_process(ranks, settings):
    ranks(2, "cases.py:an_adapter_learns_as_alone", {"tp": 2}, **settings)


SHARED_BY_TWO = {"tp": 2, "sharding": "hybrid", "shard_group_size": 1}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((2, {"tp": 2}), (2, {}), id="to_dp"),
        pytest.param((2, {"tp": 2}), (1, {}), id="to_one_process"),
        pytest.param((1, {}), (2, {"tp": 2}), marks=pytest.mark.slow, id="from_one_process"),
        pytest.param((2, {"tp": 2}), (4, {"tp": 2}), marks=pytest.mark.slow, id="to_four"),
        pytest.param((4, SHARED_BY_TWO), (2, {"sp": 2}), marks=pytest.mark.slow, id="to_sp"),
        pytest.param((4, {"tp": 2, "sp": 2}), (1, {}), marks=pytest.mark.slow, id="from_both"),
    ],
)
@pytest.mark.slow
def test_a_run_goes_on_under_another_mesh(ranks, tmp_path, saved, loaded):
    # one key-value head for each rank that shares a sequence's tokens and layers
    model = {"num_key_value_heads": 4} if {"tp", "sp"} <= {*saved[1]} else {}
    for (size, options), name in (
        (saved, "save_for_another_world"),
        (loaded, "go_on_from_another_world"),
    ):
        ranks(size, f"cases.py:{name}", options, shared=str(tmp_path), model=model)


@pytest.mark.slow
def test_a_run_of_the_torch_engine_goes_on_with_shared_layers(ranks, tmp_path):
    ranks(1, "cases.py:save_for_another_world", {}, backend="torch", shared=str(tmp_path))
    ranks(2, "cases.py:go_on_from_another_world", {"tp": 2}, shared=str(tmp_path))


@pytest.mark.slow
def test_a_run_with_shared_layers_goes_on_in_the_torch_engine(ranks, tmp_path):
    ranks(2, "cases.py:save_for_another_world", {"tp": 2}, shared=str(tmp_path))
    ranks(1, "cases.py:go_on_from_another_world", {}, backend="torch", shared=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("contract", KEPT, ids=name_of)
@pytest.mark.parametrize("options", [SHARED_BY_TWO, {"tp": 2, "sharding": "none"}], ids=str)
def test_four_ranks_keep_the_contracts(ranks, options, contract):
    ranks(4, contract, options)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["critic", "reward_model"])
def test_a_value_head_learns_on_ranks_that_share_tokens_and_layers(ranks, role):
    ranks(4, "a_value_head_learns_as_alone", {"sp": 2, "tp": 2}, role=role, model={"num_key_value_heads": 4})


@pytest.mark.parametrize(
    ("options", "heads"),
    [({"sp": 4}, 1), ({"sp": 4}, 2), ({"sp": 2}, 1), ({"sp": 2, "tp": 2}, 2)],
    ids=str,
)
@pytest.mark.parametrize("contract", [LOG_PROBS, GRADIENT], ids=name_of)
@pytest.mark.slow
def test_ranks_that_share_tokens_share_key_value_heads(ranks, options, heads, contract):
    ranks(4, contract, options, model={"num_key_value_heads": heads})


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.slow
def test_an_adapter_learns_on_ranks_that_share_key_value_heads(ranks, heads):
    size = 2 * heads
    ranks(size, "cases.py:an_adapter_learns_as_alone", {"sp": size}, model={"num_key_value_heads": heads})


@pytest.mark.slow
def test_memory_is_spread_over_ranks_that_share_layers(ranks):
    ranks(2, "cases.py:memory_is_spread", {"tp": 2})


@pytest.mark.parametrize("options", [{"tp": 2}, {"sp": 2}], ids=str)
@pytest.mark.slow
def test_ranks_with_the_same_data_draw_the_same_numbers(ranks, options):
    ranks(2, "the_same_numbers_are_drawn", options)


@pytest.mark.slow
def test_a_sharded_model_that_computes_something_else_is_refused(ranks):
    ranks(2, "what_a_rank_left_out_is_found", {"tp": 2})


@pytest.mark.slow
def test_a_whole_model_that_a_cpu_does_not_run_is_refused_where_it_is_to_be_compared(ranks):
    ranks(2, "the_whole_does_not_run", {"probe": True})


@pytest.mark.slow
def test_nothing_is_compared_where_the_table_says_so(ranks):
    ranks(2, "what_a_rank_left_out_is_not_looked_for", {"tp": 2, "probe": False})


def test_a_comparison_that_is_asked_for_and_cannot_be_made_is_refused():
    with pytest.raises(
        ConfigError, match=r"critic\.fsdp\.probe = true: only models of transformers .* Linear"
    ):
        Probe(nn.Linear(2, 2), None, FSDPOptions(probe=True), "critic")
    assert Probe(nn.Linear(2, 2), None, FSDPOptions(), "critic").expected is None


@pytest.mark.parametrize("options", [{"tp": 2, "probe": False}, {"sp": 2, "probe": False}], ids=str)
@pytest.mark.slow
def test_a_head_whose_rows_cannot_be_shared_is_refused_at_the_start(ranks, options):
    words = [f"actor.fsdp.{next(iter(options))}: the head of Qwen3ForCausalLM is not known"]
    ranks(2, "cases.py:refused_model", options, model={"logit_bend": 2.0}, words=words)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"tp": 3}, {}, ["actor.fsdp.tp is 3", "2 ranks", "Set it to 2 (one of 1, 2)"]),
        ({"tp": 2, "sp": 2}, {}, ["actor.fsdp.tp 2", "actor.fsdp.sp 2", "groups of 4 ranks", "Set it to 1"]),
        ({"tp": 2}, {"num_key_value_heads": 1}, ["actor.fsdp.tp is 2", "1 key-value heads", "Set it to 1"]),
        ({"tp": 2}, {"intermediate_size": 49}, ["actor.fsdp.tp is 2", "intermediate size of 49"]),
        ({"tp": 2}, {"model_type": "gpt2", "n_embd": 32}, ["actor.fsdp.tp", "no plan", "'gpt2'"]),
        ({"tp": 2}, {"model_type": "qwen3_moe"}, ["actor.fsdp.tp", "packed_colwise", "experts"]),
        (
            {"sp": 2},
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            ["actor.fsdp.sp is 2", "3 query heads", "Set it to 1"],
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_a_model_is_built(ranks, options, model, words):
    ranks(2, "refused_before_it_is_built", options, model=model, words=words)


@pytest.mark.slow
def test_units_that_leave_a_shared_layer_over_are_refused(ranks):
    options = {"tp": 2, "wrap": {"layer_classes": ["Qwen3MLP"]}}
    ranks(2, "cases.py:refused_model", options, words=["actor.fsdp.wrap", "q_proj", "lies in no unit"])


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"dora": True}, ["actor.fsdp.tp", "DoRA"]),
        ({"target_modules": ["embed_tokens"]}, ["actor.fsdp.tp", "embeddings", "lora.target_modules"]),
    ],
    ids=["dora", "embeddings"],
)
@pytest.mark.slow
def test_an_adapter_that_layers_cannot_be_shared_with_is_refused(ranks, lora, words):
    ranks(2, "refused_adapter", {"tp": 2}, lora=lora, words=words)
