"""engine replay --swap: one part of a step exchanged, on tiny runs."""

from __future__ import annotations

import json
import shutil

import pytest

WRONG = '''
from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions


class WrongEngine(TorchEngine):
    """A backward pass in which a layer gets a part of its gradient alone."""

    def _build_model_optimizer(self, **given):
        built = super()._build_model_optimizer(**given)
        module = built[0] if isinstance(built, tuple) else built
        module.model.layers[0].register_full_backward_pre_hook(lambda module, given: (given[0].tril(),))
        return built


@hookimpl
def engine_train_engines():
    return {"wrong": TrainBackend(load=WrongEngine, config=TorchOptions)}
'''

SWAPS = {
    "actor.torch.compute_dtype=bf16": "log-probs",
    "algorithm.advantage=rloo": "advantages or loss",
    "algorithm.loss_aggregation=seq-mean-token-sum": "advantages or loss",
    "algorithm.entropy_coef=0.1": "advantages or loss",
    "actor.optim.max_grad_norm=1e-6": "update",
    "actor.optim.lr=0.3": "update",
    "actor.optim.weight_decay=0.5": "update",
    "actor.optim.betas=[0.5, 0.9]": "update",
}


@pytest.fixture
def run(engine, grpo_run):
    """A GRPO run of two steps, each with a checkpoint: replays a step of it with swaps and returns what is printed."""
    assert engine("train", "grpo.toml").code == 0

    def swap(*settings, step=2):
        sets = [word for setting in settings for word in ("--swap", setting)]
        answer = engine("replay", "first", "--step", str(step), *sets)
        assert answer.code == 0, answer.err
        return answer.out

    return swap


@pytest.mark.slow
def test_the_swapped_part_is_named_as_the_first_that_differs(run):
    for setting, part in SWAPS.items():
        out = run(setting)
        assert f"The first part that differs: {part} (" in out, (setting, out)


def test_a_swap_of_sampler_or_reward_samples_the_step_again(run):
    assert "The first part that differs: samples (" in run("rollout.temperature=0.5")
    assert "The first part that differs: rewards (" in run("reward.python.weight=0.5")
    assert "first part" not in run("rollout.hf.batch_size=16")


def test_sampling_again_needs_the_checkpoint_of_the_step_before(engine, run, tmp_path):
    shutil.rmtree(tmp_path / "runs/first/checkpoints/step_00000001")
    answer = engine("replay", "first", "--step", "2", "--swap", "rollout.temperature=0.5")
    assert answer.code == 4
    assert (
        "--step 2: sampler and rewards can be compared in a step after a checkpoint. Choose step 1."
        in answer.err
    )


def test_another_backend_and_another_attention_differ_by_rounding_alone(run):
    for setting in ("actor.backend=fsdp", "model.attention=eager"):
        out = run(setting)
        assert "more than" not in out, (setting, out)
        assert "model.layers.1 " in out


def test_a_gradient_that_is_wrong_from_a_layer_on_is_found_by_its_updates(run, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    out = run(f'plugins=["{tmp_path / "wrong.py"}"]', "actor.backend=wrong", step=1)
    assert "The last in the model is model.layers.0" in out, out


def test_json_has_the_layers_and_what_is_said(engine, run):
    answer = engine("replay", "first", "--step", "2", "--swap", "actor.optim.lr=0.3", "--json")
    found = json.loads(answer.out)
    assert found["said"][0].startswith("The first part that differs: update (actor/lr: ")
    layers = found["layers"]
    assert layers["model.layers.1"]["difference"] == pytest.approx(1, abs=0.1)
    assert json.loads(engine("replay", "first", "--step", "2", "--json").out)["layers"] == {}
