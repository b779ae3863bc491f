"""Whole runs that train an adapter: they learn, the base is the reference, they resume, they are exported."""

import json
import logging

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine_core import Trainer, load_config
from engine_core.cli.main import main
from engine_core.errors import ConfigError
from engine_core.runs.checkpoint import Checkpoints
from engine_plugin_trainers.preference import DPOTrainer
from engine_plugin_trainers.sft import SFTTrainer

LORA = {"actor.lora.rank": 4, "actor.optim.lr": 1e-2}


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def trainer(settings, changes=None):
    return Trainer(load_config(overrides={**settings, **LORA, **(changes or {})}), rewards=[digits])


@pytest.fixture
def supervised(grpo, world):
    """Settings of an SFT run."""
    kept = {k: v for k, v in grpo.items() if not k.startswith("rollout")}
    return {**kept, "trainer": "sft", "data.train": str(world / "data" / "sft.jsonl"), **LORA}


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def saved(run, role="actor"):
    """The tensors of a role in the newest checkpoint."""
    return load_file(Checkpoints(run.folder.checkpoints).latest() / role / "weights.safetensors")


def test_sft_with_an_adapter_learns_and_leaves_the_base_alone(supervised):
    run, fresh = (SFTTrainer(load_config(overrides={**supervised, "run.steps": 12})) for _ in range(2))
    run.train()
    losses = [line["actor/loss"] for line in metrics_of(run)]
    assert losses[-1] < losses[0] - 0.1
    fresh.setup()
    base = fresh.runtime.engines["actor"].module
    frozen = {n: p for n, p in run.runtime.engines["actor"].module.named_parameters() if not p.requires_grad}
    assert len(frozen) > 14
    assert all(torch.equal(value, base.get_parameter(name)) for name, value in frozen.items())
    for each in (run, fresh):
        each.close()


def test_grpo_with_an_adapter_has_the_base_as_its_reference_and_builds_no_second_model(grpo, caplog):
    caplog.set_level(logging.INFO, logger="engine")
    run = trainer(grpo, {"algorithm.kl_coef": 0.1, "run.steps": 3})
    run.train()
    assert run.runtime.engines.keys() == {"actor", "rollout"}
    assert "The reference is the actor without its adapter: no second model is built." in caplog.text
    kl = [line["actor/kl"] for line in metrics_of(run)]
    assert kl[0] == 0
    assert kl[-1] > 0
    assert metrics_of(run)[0]["mismatch/mean_abs"] < 1e-5
    run.close()


def test_the_base_gives_what_a_reference_model_of_its_own_gives(grpo):
    changes = {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"}
    shared, own = trainer(grpo, changes), trainer(grpo, {**changes, "run.name": "own", "ref.lora.rank": 1})
    for run in (shared, own):
        run.train()
    assert own.runtime.engines.keys() == {"actor", "ref", "rollout"}
    for one, other in zip(metrics_of(shared), metrics_of(own), strict=True):
        assert {k: v for k, v in one.items() if k.startswith(("actor", "reward"))} == {
            k: v for k, v in other.items() if k.startswith(("actor", "reward"))
        }
    for run in (shared, own):
        run.close()


def test_dpo_compares_with_the_base(grpo):
    rows = [{"prompt": f"{n} + 1 =", "chosen": "2", "rejected": "7 apples"} for n in range(8)]
    kept = {k: v for k, v in grpo.items() if not k.startswith(("rollout", "data"))}
    settings = {**kept, "trainer": "dpo", "data.prompts_per_step": 4, "run.steps": 12, **LORA}
    run = DPOTrainer(load_config(overrides=settings), data=rows)
    run.train()
    assert run.runtime.engines.keys() == {"actor"}
    losses = [line["actor/loss"] for line in metrics_of(run)]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # -log sigmoid(0): the policy is the reference
    assert losses[-1] < 0.63
    run.close()


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_stop_and_resume_is_the_uninterrupted_run_bit_for_bit(grpo, supervised, kind):
    def make(changes):
        if kind == "grpo":
            return trainer(grpo, {"algorithm.kl_coef": 0.1, "algorithm.mini_batch_prompts": 2, **changes})
        return SFTTrainer(load_config(overrides={**supervised, **changes}))

    straight = make({"run.name": "straight", "run.steps": 4})
    straight.train()
    half = make({"run.name": "half", "run.steps": 2})
    half.train()
    half.close()
    assert all(name.startswith("base_model.model.") for name in saved(half))
    resumed = make({"run.name": "half", "run.steps": 4})
    resumed.train(resume=half.folder.path)
    expected, found = saved(straight), saved(resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for run in (straight, resumed):
        run.close()


def test_a_run_is_exported_merged_and_as_an_adapter(supervised, tmp_path):
    run = SFTTrainer(load_config(overrides=supervised))
    run.train()
    ids = torch.randint(1, 40, (1, 12), generator=torch.Generator().manual_seed(0))
    with run.runtime.engines["actor"].generation_module() as module:
        expected = module(input_ids=ids.to(next(module.parameters()).device)).logits.cpu()
    run.close()
    whole = {name: value for name, value in supervised.items() if not name.startswith("actor.lora")}
    plain = SFTTrainer(load_config(overrides=whole))
    plain.export(tmp_path / "base")
    plain.close()
    folder = str(run.folder.path)
    assert main(["export", folder, str(tmp_path / "merged")]) == 0
    assert main(["export", folder, str(tmp_path / "adapter"), "--adapter"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert (base(input_ids=ids).logits - expected).abs().max() > 0.1
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=0, atol=1e-4)


def test_a_run_goes_on_from_the_adapter_of_another(supervised, tmp_path):
    first = SFTTrainer(load_config(overrides=supervised))
    first.train()
    first.export(tmp_path / "adapter", adapter=True)
    expected = first.runtime.engines["actor"].adapter.tensors()
    settings = {**supervised, "actor.lora.path": str(tmp_path / "adapter"), "actor.lora.rank": 16}
    second = SFTTrainer(load_config(overrides=settings))
    second.setup()
    found = second.runtime.engines["actor"].adapter.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for run in (first, second):
        run.close()


def test_a_run_without_an_adapter_has_none_to_export(grpo, tmp_path):
    run = Trainer(load_config(overrides=grpo), rewards=[digits])
    with pytest.raises(ConfigError, match=r"has no \[actor\.lora\]"):
        run.export(tmp_path / "out", adapter=True)
    run.close()


def test_a_base_that_is_the_reference_follows_nobody(grpo):
    changes = {"algorithm.kl_coef": 0.1, "algorithm.ref_refresh_steps": 2}
    with pytest.raises(
        ConfigError, match=r"algorithm\.ref_refresh_steps: .*weights below an adapter never change"
    ):
        trainer(grpo, changes)
    trainer(grpo, {**changes, "ref.path": grpo["model.path"] + "/."}).close()


def test_a_change_of_the_adapter_is_refused_on_resume(grpo):
    run = trainer(grpo, {"run.steps": 1})
    run.train()
    run.close()
    with pytest.raises(
        ConfigError, match=r"actor\.lora\.rank: the checkpoint was written with 4, now it is 8"
    ):
        trainer(grpo, {"run.steps": 2, "actor.lora.rank": 8}).train(resume=run.folder.path)
