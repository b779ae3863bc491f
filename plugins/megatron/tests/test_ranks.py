"""Several ranks in real processes: one launch of each number of ranks runs all cases. A CPU answers for CUDA."""

from pathlib import Path

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.launcher import Workers

HERE = Path(__file__).parent


class Megatron(TrainEngineSuite):
    backend = "megatron"


def case_of(name):
    return Megatron.contracts[f"test_{name}"].case


GRADIENT = case_of("the_gradient_is_that_of_the_global_sum")
RESUME = case_of("a_resumed_run_continues_exactly")
ADD_UP = case_of("gradients_add_up_over_calls")
SLEEP = case_of("an_engine_that_slept_goes_on_as_if_it_had_not")
WEIGHTS = case_of("named_weights_follow_a_step")
RATIO = case_of("the_ratio_of_an_unchanged_policy_is_exactly_one")
KEPT = (GRADIENT, RESUME, ADD_UP, SLEEP, WEIGHTS, RATIO)
MOVES = Megatron.contracts["test_a_run_goes_on_on_another_number_of_ranks"]
FOUR_LAYERS = {"model": {"num_hidden_layers": 4}}
EXPERTS = {
    "model": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
}


@pytest.fixture(scope="module")
def ranks():
    groups = {}

    def run(size, case, options=None, **settings):
        if size not in groups:
            groups[size] = Workers(size, "engine_plugin_megatron.cpu_emulation:emulated", HERE)
        case = case if ":" in case else f"cases.py:{case}"
        groups[size].run(Megatron.bench, case, {**Megatron.settings(), "options": options or {}, **settings})

    yield run
    for group in groups.values():
        group.close()


REFUSED = [
    ({"tp": 3}, ["[actor.megatron] tp 3", "2 ranks", "tp = 2, pp = 1"]),
    ({"ep": 2, "tp": 2}, ["actor.megatron.ep is 2", "Set it to 1"]),
    ({"pp": 2, "virtual_pp": 2}, ["[actor.megatron] virtual_pp is 2", "1 layers of a stage", "Set it to 1"]),
    ({"ep": 2}, ["no experts"]),
]


def test_what_does_not_fit_is_refused_before_anything_is_allocated(ranks):
    ranks(2, "what_does_not_fit_is_refused", refused=REFUSED)


def test_steps_are_those_of_the_torch_engine(ranks):
    ranks(2, "steps_as_alone", {"tp": 2, "sequence_parallel": True})


def test_a_resumed_run_has_a_step_count_for_each_parameter(ranks):
    ranks(2, "each_parameter_has_its_own_step_count", {"tp": 2})


def test_split_logits_give_the_outputs_of_whole_ones(ranks):
    ranks(2, "gradients_of_split_logits", {"tp": 2})


def test_a_loss_that_is_a_metric_is_not_divided(ranks):
    ranks(2, "a_loss_is_reported_as_it_was", {"tp": 2})


def test_steps_between_sleep_and_saves_are_those_of_the_torch_engine(ranks):
    ranks(2, "steps_with_breaks_as_alone", {"tp": 2})


def test_roles_of_one_process_have_one_layout(ranks):
    ranks(2, "one_layout_a_process", {"tp": 2})


OTHERS = {
    "tokens_shared": {"tp": 2, "sequence_parallel": True},
    "full_recompute": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "selective_recompute": {"recompute": "selective"},
    "whole_optimizer": {"distributed_optimizer": False},
    "overlap": {"overlap_grad_reduce": True},
    "overlap_both": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "stages_and_overlap": {"pp": 2, "overlap_grad_reduce": True, "distributed_optimizer": False},
    "interleaved": {"pp": 2, "virtual_pp": 2, "sequence_parallel": False},
    "interleaved_overlap": {"pp": 2, "virtual_pp": 2, "overlap_grad_reduce": True},
    "stages_recompute": {"pp": 2, "recompute": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.rpartition(":")[2])
@pytest.mark.parametrize("name", OTHERS)
def test_every_configuration_keeps_the_contracts(ranks, name, case):
    ranks(2, case, OTHERS[name], **FOUR_LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"pp": 2}),
        (2, {}),
        (2, {"distributed_optimizer": False}),
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    ],
)
def test_steps_are_those_of_the_torch_engine_on_any_layout(ranks, size, options):
    ranks(size, "steps_as_alone", options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {}])
def test_a_critic_learns_as_in_the_torch_engine(ranks, options):
    ranks(2, "values_as_alone", options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
def test_a_frozen_role_gives_log_probs_alone(ranks, options):
    ranks(2, "a_frozen_role_gives_log_probs_alone", options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": False}, {"compute_dtype": "bf16"}])
def test_memory_is_given_back_in_sleep(ranks, options):
    ranks(2, "memory_is_given_back", options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": False}])
def test_optimizer_state_is_spread_over_copies(ranks, options):
    ranks(2, "optimizer_state_is_spread", options)


BF16 = [
    {"compute_dtype": "bf16"},
    {"compute_dtype": "bf16", "distributed_optimizer": False},
    {"compute_dtype": "bf16", "tp": 2},
    {"compute_dtype": "bf16", "pp": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", BF16)
def test_a_run_in_bf16_resumes_bit_for_bit(ranks, options):
    ranks(2, RESUME, options)
    ranks(2, "each_parameter_has_its_own_step_count", options)


@pytest.mark.slow
@pytest.mark.parametrize("options", BF16)
def test_float32_weights_of_a_folder_are_stepped_as_they_are(ranks, options):
    ranks(2, "the_copy_that_is_stepped_is_not_rounded", options)


FP16 = {"compute_dtype": "fp16", "loss_scale": 2.0**24}


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({}, {"pp": 2}, {"cp": 2}, {"distributed_optimizer": False})
        ),
    ],
    ids=str,
)
def test_fp16_scales_the_loss(ranks, options):
    ranks(2, "fp16_scales_and_recovers", {**FP16, **options})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_fp16_has_one_scale_for_experts_and_what_ranks_share(ranks, options):
    ranks(2, "fp16_scales_and_recovers", {**FP16, **options}, **EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pp": 2}], ids=str)
def test_a_run_in_fp16_resumes_bit_for_bit(ranks, options):
    ranks(2, RESUME, {"compute_dtype": "fp16", "loss_scale": 64.0, **options})


LAYOUTS = [
    (2, {"tp": 2}, 2, {"pp": 2}),
    (2, {"pp": 2}, 2, {"distributed_optimizer": False}),
    (2, {}, 4, {"tp": 2, "pp": 2}),
    (4, {"tp": 2, "sequence_parallel": True}, 2, {"pp": 2, "virtual_pp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "before", "loaded", "after"), LAYOUTS)
def test_a_checkpoint_loads_on_another_layout(ranks, tmp_path, saved, before, loaded, after):
    ranks(saved, MOVES.case, before, shared=str(tmp_path), **FOUR_LAYERS)
    ranks(loaded, MOVES.follow_case, after, shared=str(tmp_path), **FOUR_LAYERS)


@pytest.mark.slow
def test_a_run_moves_to_the_torch_engine_and_back(ranks, tmp_path):
    ranks(2, MOVES.case, {"tp": 2}, shared=str(tmp_path / "one"))
    ranks(1, MOVES.follow_case, backend="torch", shared=str(tmp_path / "one"))
    ranks(1, MOVES.case, backend="torch", shared=str(tmp_path / "two"))
    ranks(2, MOVES.follow_case, {"pp": 2}, shared=str(tmp_path / "two"))


EP, PP, TP, CP = {"ep": 2}, {"pp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}


def test_sequences_that_ranks_share_have_the_gradient_of_whole_ones(ranks):
    ranks(2, "gradients_as_alone", CP)


SHARED = {
    "alone": (2, CP, {}),
    "recomputed": (2, {**CP, "recompute": "full"}, {}),
    "attention_recomputed": (2, {**CP, "recompute": "selective"}, {}),
    "whole_optimizer": (2, {**CP, "distributed_optimizer": False}, {}),
    "more_sharers_than_keys": (4, {"cp": 4}, {}),
    "with_data": (4, CP, {}),
    "with_layers": (4, {**CP, "tp": 2}, {}),
    "with_tokens_of_layers": (4, {**CP, **TP}, {}),
    "with_stages": (4, {**CP, **PP}, {}),
    "with_chunks": (4, {**CP, **PP, "virtual_pp": 2}, FOUR_LAYERS),
    "with_experts": (2, {**CP, **EP}, EXPERTS),
    "with_stages_and_experts": (4, {**CP, **PP, **EP}, EXPERTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_sequences_are_shared_beside_all_else(ranks, name):
    size, options, settings = SHARED[name]
    for case in ("gradients_as_alone", "steps_as_alone", "values_as_alone"):
        ranks(size, case, options, **settings)


@pytest.mark.slow
def test_a_checkpoint_of_ranks_that_share_sequences_loads_on_another_layout(ranks, tmp_path):
    ranks(4, MOVES.case, {**CP, **TP}, shared=str(tmp_path / "one"))
    ranks(2, MOVES.follow_case, PP, shared=str(tmp_path / "one"))
    ranks(1, MOVES.follow_case, backend="torch", shared=str(tmp_path / "one"))
    ranks(2, MOVES.case, {}, shared=str(tmp_path / "two"))
    ranks(2, MOVES.follow_case, CP, shared=str(tmp_path / "two"))


def test_steps_of_experts_on_two_ranks_are_those_of_the_torch_engine(ranks):
    ranks(2, "steps_as_alone", EP, **EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"), [(2, EP), (2, PP), (2, TP), (4, {**EP, **TP}), (4, {**EP, **PP}), (4, EP)]
)
def test_a_mixture_of_experts_steps_as_in_the_torch_engine(ranks, size, options):
    ranks(size, "steps_as_alone", options, **EXPERTS)
    ranks(size, RESUME, options, **EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "before", "after"),
    [
        (2, EP, [(2, TP), (2, PP), (4, {**EP, **TP})]),
        (2, TP, [(2, PP), (2, EP)]),
        (4, {**EP, **TP}, [(2, PP), (2, EP)]),
    ],
)
def test_a_checkpoint_of_experts_loads_on_another_layout(ranks, tmp_path, size, before, after):
    ranks(size, MOVES.case, before, shared=str(tmp_path), **EXPERTS)
    for loaded, options in after:
        ranks(loaded, MOVES.follow_case, options, shared=str(tmp_path), **EXPERTS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tp": 2},
        {"pp": 2},
        {"overlap_grad_reduce": True, "overlap_param_gather": True, "compute_dtype": "bf16"},
    ],
    ids=["dp", "tp", "pp", "overlap"],
)
def test_nothing_is_left_of_a_closed_engine(ranks, options):
    ranks(2, "nothing_is_left_of_a_closed_engine", options)


@pytest.mark.parametrize("options", [{}, {"ep": 2}], ids=["dp", "ep"])
def test_nothing_is_left_of_a_closed_engine_of_experts(ranks, options):
    ranks(2, "nothing_is_left_of_a_closed_engine", options, **EXPERTS)
