"""ZeRO's stages, types, offload and checkpoints: one launch of each number of ranks runs all cases of ``cases``."""

from pathlib import Path

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.launcher import Workers

HERE = Path(__file__).parent
IN_PARTS = {"param_persistence_threshold": 0}  # small weights, too


class DeepSpeed(TrainEngineSuite):
    backend = "deepspeed"


def case(name):
    return DeepSpeed.contracts[f"test_{name}"].case


GRADIENT = case("the_gradient_is_that_of_the_global_sum")
OUTPUTS = case("gradients_of_other_outputs_equal_the_reference")
NORM = case("the_norm_is_the_same_on_any_number_of_ranks")
RESUME = case("a_resumed_run_continues_exactly")
POISON = case("a_gradient_that_is_not_finite_skips_the_step")
ADDED = case("gradients_add_up_over_calls")
CLIPPED = case("gradients_are_clipped_to_max_grad_norm")
FIT = case("weights_that_do_not_fit_are_refused")


def name_of(value):
    return value.rpartition(":")[2] if isinstance(value, str) else None


@pytest.fixture(scope="module")
def ranks():
    groups = {}

    def run(size, name, options=None, **settings):
        if size not in groups:
            groups[size] = Workers(size, root=HERE, deadline=240)
        name = name if ":" in name else f"cases.py:{name}"
        groups[size].run(
            DeepSpeed.bench, name, {**DeepSpeed.settings(), "options": options or {}, **settings}
        )

    yield run
    for group in groups.values():
        group.close()


def slowly(*values, id=None):
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


@pytest.mark.parametrize("contract", [GRADIENT, OUTPUTS, POISON, RESUME], ids=name_of)
def test_weights_in_parts_keep_the_contracts(ranks, contract):
    ranks(2, contract, IN_PARTS)  # all of them: test_conformance.py


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
STAGES = [
    pytest.param({"stage": 2}, id="2"),
    slowly({"stage": 0}, id="0"),
    slowly({"stage": 1}, id="1"),
    slowly({"stage": 1, **OFFLOADED}, id="1-offload"),
    slowly({"stage": 2, **OFFLOADED}, id="2-offload"),
    slowly({**IN_PARTS, **OFFLOADED}, id="3-offload"),
    slowly({**IN_PARTS, **OFFLOADED, "offload_param": {"device": "cpu"}}, id="3-offload-all"),
    slowly({**IN_PARTS, "activation_checkpointing": True, "log_prob_recompute": True}, id="3-recompute"),
    slowly({**IN_PARTS, "loading": "sharded"}, id="3-sharded"),
    slowly({"stage": 2, "overlap_comm": True}, id="2-overlap"),
]


@pytest.mark.parametrize("options", STAGES)
def test_one_step_is_that_of_the_whole_batch(ranks, options):
    ranks(2, "one_step", options, gradient_tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("contract", [ADDED, CLIPPED, FIT, NORM, POISON, RESUME], ids=name_of)
@pytest.mark.parametrize("options", [{"stage": 2, **OFFLOADED}, {**IN_PARTS, **OFFLOADED}], ids=str)
def test_offloaded_stages_keep_the_contracts(ranks, options, contract):
    ranks(2, contract, options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gives_the_gradient_within_its_rounding(ranks, stage):
    # eight bits of mantissa: 2^-8 a product, of which each gradient is a chain of about ten
    options = {"stage": stage, "compute_dtype": "bf16", "param_persistence_threshold": 0}
    ranks(2, "one_step", options, gradient_tolerance=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_scales_the_loss(ranks, stage):
    ranks(2, "fp16_scales_and_recovers", {"stage": stage, "compute_dtype": "fp16"})


@pytest.mark.slow
def test_memory_is_spread(ranks):
    ranks(2, "weights_are_spread", IN_PARTS)


@pytest.mark.slow
def test_weights_are_gathered_in_bounded_buckets(ranks):
    ranks(2, "buckets_are_bounded", IN_PARTS)


def test_each_rank_reads_its_part_of_a_folder(ranks):
    ranks(2, "each_rank_reads_its_part", {**IN_PARTS, "loading": "sharded"}, gradient_tolerance=1e-5)


def test_an_adapter_learns_as_in_one_process(ranks):
    ranks(2, "lora_cases.py:an_adapter_learns_as_alone", IN_PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_value_head_learns_as_in_one_process(ranks, stage):
    ranks(2, "values_are_learned", {"stage": stage, "param_persistence_threshold": 0})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_writes_some_of_a_checkpoint(ranks, stage):
    ranks(2, "every_rank_writes_some", {"stage": stage})


@pytest.mark.slow
def test_state_that_zero_cannot_keep_is_refused(ranks):
    ranks(2, "another_optimizer_is_refused", {"stage": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("deepspeed", 2, IN_PARTS), ("deepspeed", 1, {"stage": 1})),
        (("deepspeed", 1, {"stage": 2}), ("deepspeed", 2, {**IN_PARTS, **OFFLOADED})),
        (("deepspeed", 2, {"stage": 1}), ("deepspeed", 4, IN_PARTS)),
        (("deepspeed", 2, IN_PARTS), ("torch", 1, {})),
        (("torch", 1, {}), ("deepspeed", 2, {"stage": 2})),
        (("fsdp", 2, {}), ("deepspeed", 2, IN_PARTS)),
        (("deepspeed", 2, {"stage": 2}), ("fsdp", 2, {})),
        (("deepspeed", 2, {"stage": 0}), ("deepspeed", 2, IN_PARTS)),
    ],
    ids=lambda value: f"{value[0]}{value[1]}",
)
def test_a_run_goes_on_elsewhere(ranks, tmp_path, saved, loaded):
    for (backend, size, options), name in ((saved, "save_for_another"), (loaded, "go_on_from_another")):
        ranks(size, name, options, backend=backend, shared=str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        slowly(IN_PARTS, id="3"),
        slowly({}, id="3-small-weights-whole"),
        slowly({"stage": 1, "compute_dtype": "bf16"}, id="1-bf16"),
        slowly({"stage": 2}, id="2"),
        slowly({**IN_PARTS, "compute_dtype": "bf16"}, id="3-bf16"),
    ],
)
def test_an_engine_asleep_holds_no_memory_and_goes_on(ranks, options):
    ranks(2, "asleep_it_holds_no_memory", options)


@pytest.mark.parametrize(
    "options",
    [IN_PARTS, slowly({**IN_PARTS, "compute_dtype": "bf16"}, id="3-bf16"), slowly({"stage": 2}, id="2")],
)
def test_nothing_is_left_of_a_closed_engine(ranks, options):
    ranks(2, "nothing_is_left_of_a_closed_engine", options)
