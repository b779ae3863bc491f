"""Several ranks in real processes: one launch of each number of ranks runs all cases."""

from pathlib import Path

import pytest

from engine_plugin_testing import TrainEngineSuite, reference
from engine_plugin_testing.launcher import Workers

HERE = Path(__file__).parent


class FSDP(TrainEngineSuite):
    backend = "fsdp"


GRADIENT = FSDP.contracts["test_the_gradient_is_that_of_the_global_sum"].case
RESUME = FSDP.contracts["test_a_resumed_run_continues_exactly"].case
SLEEP = FSDP.contracts["test_an_engine_that_slept_goes_on_as_if_it_had_not"].case
WEIGHTS = FSDP.contracts["test_named_weights_follow_a_step"].case
EXPORT = FSDP.contracts["test_export_is_loaded_by_from_pretrained"].case
POISON = FSDP.contracts["test_a_gradient_that_is_not_finite_skips_the_step"].case
SAMPLER = FSDP.contracts["test_the_generation_module_gives_the_logits_of_the_policy"].case
KEPT = (GRADIENT, RESUME, SLEEP, WEIGHTS, POISON)


@pytest.fixture(scope="module")
def ranks():
    groups = {}

    def run(size, case, options=None, **settings):
        if size not in groups:
            groups[size] = Workers(size, root=HERE)
        case = case if ":" in case else f"cases.py:{case}"
        groups[size].run(FSDP.bench, case, {**FSDP.settings(), "options": options or {}, **settings})

    yield run
    for group in groups.values():
        group.close()


OPTIONS = {
    "grad_op": {"sharding": "grad_op"},
    "none": {"sharding": "none"},
    "hybrid": {"sharding": "hybrid", "shard_group_size": 1},
    "hybrid_grad_op": {"sharding": "hybrid", "shard_group_size": 2, "reshard_after_forward": False},
    "each": {"gradient_sync": "each"},
    "params_offload": {"cpu_offload": "params"},
    "optimizer_offload": {"cpu_offload": "optimizer"},
    "full_recompute": {"activation_checkpointing": "full"},
    "every_second_unit": {"activation_checkpointing": 2, "activation_offload": True},
    "two_layers_a_unit": {"wrap": {"layers_per_unit": 2}},
    "inner_units": {"wrap": {"layer_classes": ["Qwen3MLP", "Qwen3Attention"]}},
    "every_rank_reads": {"loading": "every_rank"},
}


OPTIONS["sequences"] = {"sp": 2, "activation_checkpointing": "full"}
QUICK = (
    "sequences",
    "grad_op",
    "none",
    "hybrid",
    "params_offload",
    "every_second_unit",
    "two_layers_a_unit",
)


@pytest.mark.parametrize("name", [*QUICK, "layers"])
def test_the_gradient_is_the_same_in_other_configurations(ranks, name):
    ranks(2, GRADIENT, {"tp": 2} if name == "layers" else OPTIONS[name])  # more of tp: test_mesh.py


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.rpartition(':')[2]}")
        for name in OPTIONS
        for case in KEPT
        if not (name in QUICK and case == GRADIENT)  # the test above
    ],
)
def test_every_configuration_keeps_the_contracts(ranks, name, case):
    ranks(2, case, OPTIONS[name])


@pytest.mark.parametrize(
    "options",
    [{}, {"sharding": "hybrid", "shard_group_size": 1}, {"tp": 2}],
    ids=str,
)
def test_a_step_over_parts_is_that_of_whole_lists(ranks, options):
    ranks(2, "cases_step.py:a_step_is_that_of_whole_lists", options)


def test_a_step_over_parts_keeps_no_optimizer_alive(ranks):
    ranks(2, "cases_step.py:parts_are_freed_with_their_owner")


@pytest.mark.parametrize("options", [{}, {"sharding": "none"}, {"sharding": "hybrid", "shard_group_size": 1}])
def test_memory_is_spread_as_the_table_says(ranks, options):
    ranks(2, "memory_is_spread", options)


@pytest.mark.parametrize(
    "table",
    [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}, {"sharding": "grad_op"}],
    ids=str,
)
def test_layers_are_gathered_anew_for_the_backward_pass_as_the_table_says(ranks, table):
    ranks(2, "cases_step.py:gathered_once_or_twice", table)


@pytest.mark.parametrize("sharding", ["full", "grad_op"])
def test_nothing_stays_gathered(ranks, sharding):
    ranks(2, "nothing_stays_gathered", {"sharding": sharding})


def test_a_role_that_only_infers_does_not_grow(ranks):
    ranks(2, "cases_step.py:forward_passes_leave_no_record")


def test_a_rank_without_sequences_takes_part(ranks):
    ranks(2, "a_rank_without_sequences_takes_part")


@pytest.mark.parametrize("sync", ["last", "each"])
def test_gradients_are_sent_when_the_table_says(ranks, sync):
    ranks(2, "gradients_are_reduced_once", {"gradient_sync": sync})


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(2, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_run_goes_on_under_another_number_of_ranks(ranks, tmp_path, saved, loaded):
    ranks(saved, "save_for_another_world", shared=str(tmp_path))
    ranks(loaded, "go_on_from_another_world", shared=str(tmp_path))


def test_a_run_goes_on_under_another_sharding(ranks, tmp_path):
    ranks(2, "save_for_another_world", {"sharding": "none"}, shared=str(tmp_path))
    ranks(2, "go_on_from_another_world", {"sharding": "full"}, shared=str(tmp_path))


def test_a_run_of_the_torch_engine_goes_on(ranks, tmp_path):
    ranks(1, "save_for_another_world", {}, backend="torch", shared=str(tmp_path))
    ranks(2, "go_on_from_another_world", shared=str(tmp_path))


def test_a_sharded_run_goes_on_in_the_torch_engine(ranks, tmp_path):
    ranks(2, "save_for_another_world", shared=str(tmp_path))
    ranks(1, "go_on_from_another_world", {}, backend="torch", shared=str(tmp_path))


def test_a_run_that_was_in_the_torch_engine_between_is_as_if_it_had_stayed(ranks, tmp_path):
    ranks(2, "save_for_another_world", shared=str(tmp_path))
    ranks(1, "pass_on_to_another_world", {}, backend="torch", shared=str(tmp_path))
    ranks(2, "go_on_exactly", shared=str(tmp_path))


def test_half_a_checkpoint_is_refused(ranks):
    ranks(2, "half_a_checkpoint_is_refused")


def test_saving_goes_on_beside_training(ranks):
    ranks(2, "saving_goes_on_beside_training")


def test_fp16_skips_an_overflow_and_recovers(ranks):
    ranks(2, "fp16_scales_and_recovers", {"mixed_precision": {"param_dtype": "fp16"}, "loss_scale": 2.0**24})


def test_bf16_gives_the_gradient_within_its_rounding(ranks):
    # eight bits of mantissa: 2^-8 a product, of which each gradient is a chain of about ten
    ranks(2, "one_step", {"mixed_precision": {"param_dtype": "bf16"}}, gradient_tolerance=0.08)


def test_a_critic_learns_as_in_one_process(ranks):
    ranks(2, "critic_learns_as_alone")


def test_what_does_not_fit_is_refused_by_its_key(ranks):
    refused = [
        ({"sp": 3}, ["actor.fsdp.sp is 3", "2 ranks", "1, 2"]),
        (
            {"sharding": "hybrid", "shard_group_size": 3},
            ["actor.fsdp.shard_group_size is 3", "2 ranks", "1, 2"],
        ),
        (
            {"wrap": {"layer_classes": ["Qwen3Decoder"]}},
            ["layer_classes", "Did you mean 'Qwen3DecoderLayer'"],
        ),
        ({"wrap": {"layer_classes": ["Embedding"]}}, ["tied", "lm_head.weight"]),
    ]
    ranks(2, "refusals", refused=refused)


def test_only_the_first_rank_reads_the_model(ranks):
    ranks(2, "only_the_first_rank_reads")


def test_a_model_that_does_not_load_fails_on_every_rank(ranks):
    ranks(2, "a_folder_that_does_not_load_fails_everywhere")


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_norm_is_that_of_float64_on_any_number_of_ranks_packed_or_not(ranks, size):
    ranks(size, "the_norm_is_the_references")


def test_a_checkpoint_of_another_model_is_refused_with_the_weight(ranks, tmp_path):
    reference.write_model(tmp_path / "wider", {"intermediate_size": 96}, 0, True)
    ranks(2, "another_models_checkpoint_is_refused", other=str(tmp_path / "wider"))


def test_a_module_that_a_plugin_sharded_is_lent_on_one_rank_alone(ranks):
    for size in (1, 2):
        ranks(size, "what_is_lent", plugins=["own_shards.py"], lends=size == 1)


def test_a_wrap_policy_that_names_nothing_is_refused(ranks):
    ranks(2, "a_policy_that_names_nothing_is_refused", plugins=["no_units.py"])


def test_a_model_without_layers_is_warned_of(ranks):
    ranks(2, "no_units_are_told", plugins=["no_layers.py"])


def test_batch_norm_is_refused_with_the_module_that_has_it(ranks):
    ranks(
        2,
        "refused_model",
        plugins=["batch_norm.py"],
        words=["[actor.fsdp]: 'model.layers.0.mlp.1' is a BatchNorm1d"],
    )


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"sharding": "grad_op"}, {"tp": 2}))],
)
def test_a_lent_module_is_the_whole_actor(ranks, options):
    ranks(2, "a_lent_module_is_the_whole_actor", options)


def test_a_module_that_does_not_fit_on_one_rank_is_lent_on_none(ranks):
    ranks(2, "a_module_that_does_not_fit_on_one_rank_is_lent_on_none")


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"whole": ["norm"]}], ids=["lora", "dora", "whole"])
def test_an_adapter_learns_as_in_one_process(ranks, settings):
    ranks(2, "an_adapter_learns_as_alone", **settings)


@pytest.mark.parametrize("options", [{}, {"sp": 2}], ids=str)
def test_the_roles_of_a_process_share_the_groups_of_their_layout(ranks, options):
    ranks(2, "roles_share_their_groups", options)


def test_a_model_that_differs_between_ranks_is_refused(ranks):
    ranks(2, "another_model_on_a_rank", plugins=["unequal_model.py"])


def test_a_model_that_nobody_shards_is_refused_on_several_ranks(ranks):
    ranks(2, "nobody_shards", plugins=["own_optimizer.py"], backend="own")


@pytest.mark.slow
@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.rpartition(":")[2])
def test_two_ranks_share_tokens_and_two_share_sequences(ranks, case):
    ranks(4, case, {"sp": 2})


def test_two_ranks_that_share_tokens_share_a_key_value_head(ranks):
    ranks(2, GRADIENT, {"sp": 2}, model={"num_key_value_heads": 1})


def test_a_model_whose_tokens_cannot_be_shared_is_refused(ranks):
    words = ["actor.fsdp.sp is 2", "6 query heads", "3 key-value heads"]
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    ranks(2, "refused_model", {"sp": 2}, words=words, model=heads)
