"""The seconds of a step, with speeds that are made up and against those measured on H200s."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig

from engine_core.builtin import COLUMNS
from engine_core.config import EngineConfig, RoleConfig
from engine_core.config.models import EnvironmentConfig
from engine_core.config.roles import LoRAConfig, ProcessConfig
from engine_core.contracts.memory import DecodeSpeed, MemoryNeed, PassSpeed
from engine_core.contracts.runtime import Role
from engine_core.specs import TrainerSpec
from engine_plugin_tools.bench.shapes import SHAPES, Cost, write_shape
from engine_plugin_tools.devices import Limits
from engine_plugin_tools.memory_plan import MemoryPlan
from engine_plugin_tools.time_plan import Lengths, Phase, StepPlan, measured_lengths, plan_step
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.precision import Precision
from engine_plugin_torch.speed import speed_of

COST = Cost.of(SHAPES["qwen3-0.6b"])
DEVICE = Limits("any", 1e15, 1e12)
H200 = Limits.of("h200")
IDEAL = PassSpeed(products=1.0, attention=1.0, traffic=0.0, layer=0.0)
SAMPLER = DecodeSpeed(weights=2**30, token=2**17, together=1000, reading=1.0, step=0.0)
LENGTHS = Lengths(sequences=64, prompt=100, response=50, most=50, group=8)


class Run:
    """A trainer that is not built."""

    optimizer_steps_per_step = 2

    def __init__(self, folder, columns=(), concurrent=False, **actor):
        self.config = EngineConfig()
        self.config.model.path = write_shape("qwen3-0.6b", folder / "model")
        for name, value in actor.items():
            setattr(self.config.actor, name, value)
        self.policy = SimpleNamespace(plan=SimpleNamespace(columns=columns, producers=COLUMNS))
        self.plugins = SimpleNamespace(spec=lambda kind, name: TrainerSpec(load="", concurrent=concurrent))

    def roles(self, training):
        return {"actor": Role("train"), "ref": Role("train", trainable=False), "rollout": Role("rollout")}


@pytest.fixture
def planned(tmp_path):
    """Return a function that plans a step of made-up speeds."""

    def make(
        run=None, actor=IDEAL, sampler=SAMPLER, lengths=LENGTHS, ranks=1, device=DEVICE, ratios=None, cache=0
    ):
        run = run or Run(tmp_path)
        needs = {
            "actor": MemoryNeed(speed=actor),
            "ref": MemoryNeed(speed=IDEAL),
            "rollout": MemoryNeed(idle={"cache": cache}, speed=sampler),
        }
        plan = MemoryPlan(0, ranks, 0, False, False, run.roles(True), needs)
        return plan_step(run, [plan], device, lengths, ratios or {})

    return make


def test_the_floor_of_training_is_the_models_operations_at_the_devices_rate(planned):
    train = planned().phases["train"]
    assert train.floor == pytest.approx(COST.train([150] * 64, 64 * 50) / 1e15)
    assert train.seconds == pytest.approx(train.floor)  # of an ideal backend
    assert planned(ranks=4).phases["train"].floor == pytest.approx(train.floor / 4)


def test_each_part_of_training_adds_its_seconds(planned):
    ideal = planned().phases["train"].seconds
    half = planned(actor=PassSpeed(0.5, 0.5, 0.0, 0.0)).phases["train"].seconds
    assert half == pytest.approx(2 * ideal)
    moving = planned(actor=PassSpeed(1.0, 1.0, 10.0, 0.0)).phases["train"].seconds
    assert moving - ideal == pytest.approx(64 * 150 * 28 * (1024 + 3072 + 2048) * 10 / 1e12)
    layers = planned(actor=PassSpeed(1.0, 1.0, 0.0, 0.1)).phases["train"].seconds
    assert layers - ideal == pytest.approx(2 * 28 * 0.1)  # two optimizer steps
    body = 6 * (COST.body * 64 * 150 + COST.attention * 64 * 150**2) / 1e15
    again = planned(actor=PassSpeed(1.0, 1.0, 0.0, 0.0, repeated=1.0)).phases["train"]
    assert again.seconds - ideal == pytest.approx(body / 3)
    assert again.floor == pytest.approx(ideal)


def test_frozen_weights_get_no_gradient(planned, tmp_path):
    attention = COST.train([150] * 64, 0) - COST.train([1] * 64 * 150, 0)
    whole, adapter = (
        planned(Run(tmp_path, lora=lora)).phases["train"].floor for lora in (None, LoRAConfig())
    )
    assert adapter == pytest.approx(2 / 3 * whole + attention / 3 / 1e15, rel=1e-3)


def test_annotating_is_a_forward_pass_of_each_role_that_makes_a_column(planned, tmp_path):
    assert "log_probs" not in planned().phases
    run = Run(tmp_path, columns=("old_log_probs", "ref_log_probs"))
    train, both = (planned(run).phases[name].seconds for name in ("train", "log_probs"))
    assert both == pytest.approx(2 / 3 * train)
    run.config.algorithm.correction.bypass = True
    assert planned(run).phases["log_probs"].seconds == pytest.approx(train / 3)


def test_a_plan_says_that_small_micro_batches_were_not_measured(planned, tmp_path):
    small, large = (planned(Run(tmp_path, max_tokens_per_rank=n)).phases["train"].says for n in (512, 8192))
    assert "9,600 tokens a device" in small
    assert "512 a micro-batch (not measured)" in small
    assert "micro-batch" not in large


def test_a_forward_pass_takes_a_third_and_recomputes_nothing(planned, tmp_path):
    run = Run(tmp_path, columns=("old_log_probs",))
    run.optimizer_steps_per_step = 1
    once, again = (
        planned(run, actor=PassSpeed(0.5, 0.3, 10.0, 0.1, repeated=share)).phases for share in (0.0, 1.0)
    )
    assert once["log_probs"].seconds == pytest.approx(once["train"].seconds / 3)
    assert again["log_probs"].seconds == once["log_probs"].seconds
    assert again["train"].seconds > once["train"].seconds


def test_a_role_with_another_model_takes_the_operations_of_that_model(planned, tmp_path):
    run = Run(tmp_path, columns=("ref_log_probs",))
    same = planned(run).phases["log_probs"].floor
    run.config.ref = RoleConfig(path=write_shape("qwen3-8b", tmp_path / "larger"))
    larger = Cost.of(SHAPES["qwen3-8b"])
    assert planned(run).phases["log_probs"].floor == pytest.approx(larger.train([150] * 64, 64 * 50) / 3e15)
    assert planned(run).phases["log_probs"].floor > same


def test_a_decode_step_reads_the_weights_and_the_cache(planned):
    found = planned(lengths=Lengths(64, 0, 50, 50, 8)).phases["generate"]
    read = 64 * 50 * 50 / 2 * 2**17 + 50 * 2**30
    assert found.floor == found.seconds == pytest.approx(read / 1e12)
    slow = DecodeSpeed(2**30, 2**17, 1000, reading=0.5, step=0.1, sequence=0.001)
    more = planned(lengths=Lengths(64, 0, 50, 50, 8), sampler=slow).phases["generate"]
    assert more.floor == found.floor
    assert more.seconds == pytest.approx(
        found.seconds + 64 * 1250 * 2**17 / 1e12 + 50 * 0.1 + 64 * 50 * 0.001
    )


def test_prompts_are_computed_once_for_a_group(planned):
    prompts = 2 * COST.body * 8 * 100 / 1e15
    with_, without = (planned(lengths=Lengths(64, n, 50, 50, 8)).phases["generate"].floor for n in (100, 0))
    assert with_ - without == pytest.approx(64 * 100 * 50 * 2**17 / 1e12 + prompts)


@pytest.mark.parametrize(
    ("together", "cache", "steps"), [(1000, 0, 50), (16, 0, 200), (1000, 32 * 150 * 2**17, 100)]
)
def test_responses_that_do_not_fit_at_once_take_more_decode_steps(planned, together, cache, steps):
    sampler = DecodeSpeed(2**30, 2**17, together, reading=1.0, step=1.0)
    seconds = planned(sampler=sampler, cache=cache).phases["generate"].seconds
    assert round(seconds) == pytest.approx(steps, abs=1)


def test_the_longest_response_decides_over_the_decode_steps(planned):
    sampler = DecodeSpeed(2**30, 2**17, 1000, reading=1.0, step=1.0)
    seconds = planned(sampler=sampler, lengths=Lengths(64, 100, 50, 400, 8)).phases["generate"].seconds
    assert round(seconds) == 400


def test_new_weights_take_no_time_in_a_shared_module_and_more_to_another_process(planned, tmp_path):
    assert planned().phases["sync"].seconds == 0
    own = DecodeSpeed(2**30, 2**17, 1000, 1.0, 0.0, update=1e-9)
    here = planned(sampler=own).phases["sync"].seconds
    assert here == pytest.approx(2**30 * 1e-9)
    run = Run(tmp_path)
    run.config.rollout.process = ProcessConfig()
    assert planned(run, sampler=own).phases["sync"].seconds > here
    assert (
        planned(run, sampler=own, ranks=2).phases["sync"].seconds
        > planned(run, sampler=own).phases["sync"].seconds
    )


def test_what_no_backend_answers_is_unknown(planned, tmp_path):
    found = planned(actor=None)
    assert found.phases["train"].seconds is None
    assert "actor: torch with these options has no measured speed" in found.phases["train"].says
    assert found.seconds is None
    assert planned(sampler=None).seconds is None
    assert planned().phases["reward"].seconds is planned().phases["save"].seconds is None
    assert planned().seconds is not None
    run = Run(tmp_path)
    run.config.environment = EnvironmentConfig(name="any")
    assert planned(run).phases["generate"].says == "turns and tools of episodes are not planned"


def test_a_model_whose_operations_are_not_known_has_no_plan(planned, tmp_path):
    run = Run(tmp_path)
    Qwen3MoeConfig(num_experts=8).save_pretrained(run.config.model.path)
    assert planned(run) is None


def test_a_step_is_the_sum_or_with_a_concurrent_trainer_the_longer_side():
    phases = {"generate": Phase(1.0, 5.0, ""), "train": Phase(2.0, 3.0, ""), "sync": Phase(0.5, 1.0, "")}
    assert (StepPlan(phases).floor, StepPlan(phases).seconds) == (3.5, 9.0)
    assert (StepPlan(phases, True).floor, StepPlan(phases, True).seconds) == (2.5, 5.0)


def test_ratios_of_a_phase_and_backend_correct_the_seconds_and_not_the_floor(planned):
    plain, corrected = planned(), planned(ratios={"train.torch": 1.5, "train.fsdp": 9.0})
    assert corrected.phases["train"].seconds == pytest.approx(1.5 * plain.phases["train"].seconds)
    assert corrected.phases["train"].floor == plain.phases["train"].floor
    assert corrected.phases["train"].says.endswith("calibrated: 1.50 times")
    assert corrected.phases["generate"] == plain.phases["generate"]


def test_lengths_are_those_of_the_metrics():
    config = EngineConfig()
    line = {"tokens/total": 512 * 300.0, "response_length/mean": 100.0, "response_length/max": 180.0}
    assert measured_lengths(config, [line]) == Lengths(512, 200, 100, 180, 8)
    config.data.prompts_per_step = 4
    found = measured_lengths(config, [{"tokens/total": 400.0, "tokens/learned": 100.0}])
    assert found == Lengths(4, 75, 25, 100)
    assert measured_lengths(config, [{"time/step": 1.0}]) is None


@pytest.mark.parametrize(
    ("param", "compiled", "repeated", "lengths", "seconds"),
    [
        (torch.bfloat16, True, 0.0, Lengths(128, 256, 512, 512), 0.886),
        (torch.bfloat16, True, 1.0, Lengths(128, 256, 512, 512), 1.053),
        (torch.float32, True, 0.0, Lengths(128, 256, 512, 512), 1.135),
        (torch.bfloat16, False, 0.0, Lengths(128, 256, 512, 512), 2.027),
        (torch.bfloat16, True, 0.0, Lengths(4, 0, 8192, 8192), 0.650),
    ],
)
def test_training_of_0_6b_is_within_a_quarter_of_what_an_h200_took(
    planned, tmp_path, param, compiled, repeated, lengths, seconds
):
    """The measurements are those of benchmarks/train."""
    run = Run(tmp_path)
    run.optimizer_steps_per_step = 1
    speed = speed_of(TorchOptions(), Precision(param, torch.bfloat16), compiled, repeated)
    found = planned(run, actor=speed, lengths=lengths, device=H200).phases["train"]
    assert found.seconds == pytest.approx(seconds, rel=0.25)
    assert found.floor < found.seconds
