"""Whole GRPO runs on a tiny model: the loop, its metrics, its guards, resume, and the Python API."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from engine_core import Trainer, load_config
from engine_core.errors import ConfigError, DataError, PluginError, TrainingFailed
from engine_core.runs.rollout_files import read_rollouts

RUN = """
[[reward]]
name = "length"
[reward.length]
max_tokens = 8
buffer_tokens = 4
"""


@pytest.fixture
def run_file(tmp_path):
    def write(text=RUN, **files):
        for name, content in files.items():
            (tmp_path / f"{name}.py").write_text(content)
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def trainer(grpo, changes=None, **live):
    live.setdefault("rewards", [digits])
    return Trainer(load_config(overrides={**grpo, **(changes or {})}), **live)


def metrics_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def without_time(lines):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def weights(run):
    return {
        name: tensor.to("cpu", copy=True) for name, tensor in run.runtime.engines["actor"].named_weights()
    }


@pytest.fixture
def keep_engines(monkeypatch):
    """Weights of the actor at the end of a run, by run folder name."""
    kept = {}
    close, train = Trainer.close, Trainer.train

    def ending(self):
        if self.groups:
            kept[self.folder.path.name if self.folder else ""] = weights(self)
        close(self)

    def training(self, **arguments):
        found = train(self, **arguments)
        self.close()
        return found

    monkeypatch.setattr(Trainer, "close", ending)
    monkeypatch.setattr(Trainer, "train", training)
    return kept


def test_two_steps_write_metrics_rollouts_and_a_checkpoint(grpo):
    run = trainer(grpo)
    run.train()
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [1, 2]
    wanted = {
        "reward/mean",
        "actor/loss",
        "actor/grad_norm",
        "actor/entropy",
        "mismatch/mean_abs",
        "time/generate",
    }
    assert wanted <= set(lines[0])
    assert lines[0]["rollouts"] == 16
    rollouts = read_rollouts(sorted(run.folder.rollouts_dir.glob("*.parquet"))[0])
    assert [r.group_id for r in rollouts] == [i // 4 for i in range(16)]
    assert (run.folder.checkpoints / "step_00000002" / "manifest.json").exists()


def test_a_prompt_that_the_model_has_no_room_for_is_skipped_by_name_or_ends_the_run_before_it_samples(
    grpo, caplog
):
    rows = [{"prompt": f"{n} + {n} = "} for n in range(7)]
    rows.insert(2, {"prompt": "1 + " * 5000})
    changes = {"data.max_prompt_tokens": 100_000, "data.shuffle": False}
    run = trainer(grpo, changes, data=rows)
    run.train()
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    assert "the longest prompt that leaves model and sampler room for a response is" in caplog.text
    said = r"tokens; the longest prompt that leaves model and sampler room for a response is \d+\. Shorten the row, or set"
    with pytest.raises(DataError, match=said):
        trainer(grpo, changes | {"data.over_long": "error", "run.name": "e"}, data=rows).train()


def test_sampler_and_trainer_agree_before_the_first_update(grpo):
    run = trainer(grpo)
    run.train()
    assert metrics_of(run)[0]["mismatch/max_abs"] < 1e-4
    assert metrics_of(run)[1]["mismatch/max_abs"] < 1e-4  # and after it: the sampler has the new weights


def test_the_ratio_of_an_unchanged_policy_is_exactly_one(grpo):
    run = trainer(grpo, {"algorithm.mini_batch_prompts": 2, "actor.optim.lr": 0.0})
    run.train()
    assert metrics_of(run)[0]["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics_of(run)[0]["actor/approx_kl"] == pytest.approx(0.0, abs=1e-7)


def test_the_same_seed_gives_the_same_run(grpo, keep_engines):
    first, second = trainer(grpo), trainer(grpo, {"run.name": "again"})
    first.train()
    second.train()
    assert without_time(metrics_of(first)) == without_time(metrics_of(second))
    assert all(torch.equal(keep_engines["r"][n], keep_engines["again"][n]) for n in keep_engines["r"])


def test_stop_and_resume_is_the_uninterrupted_run_bit_for_bit(grpo, keep_engines):
    settings = {
        "run.steps": 4,
        "data.prompts_per_step": 6,
        "actor.optim.schedule": "cosine",
        "actor.optim.decay_steps": 4,
    }
    whole = trainer(grpo, settings | {"run.name": "whole"})
    whole.train()
    first = trainer(grpo, settings | {"run.steps": 2})
    first.train()
    second = trainer(grpo, settings)
    second.train(resume=first.folder.path)
    assert without_time(metrics_of(whole)) == without_time(metrics_of(second))
    assert all(torch.equal(keep_engines["whole"][n], keep_engines["r"][n]) for n in keep_engines["whole"])


def test_the_reference_is_the_starting_policy(grpo):
    run = trainer(grpo, {"algorithm.kl_coef": 0.1})
    run.train()
    kl = [line["actor/kl"] for line in metrics_of(run)]
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert kl[1] > 0


def test_without_a_kl_no_reference_is_built(grpo):
    run = trainer(grpo)
    run.setup()
    assert set(run.groups) == {"actor", "rollout"}
    run.close()


def test_a_kl_in_the_reward_lowers_the_reward_and_not_the_loss(grpo):
    run = trainer(grpo, {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"})
    run.train()
    assert metrics_of(run)[0]["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-6)


def test_a_sampler_with_other_weights_ends_the_run_before_the_update(grpo, keep_engines):
    run = trainer(grpo, {"rollout.max_log_prob_gap": 1e-9})
    with pytest.raises(
        TrainingFailed, match=r"differ by .* \(rollout.max_log_prob_gap = 1e-09\).*left alone"
    ):
        run.train()
    fresh = trainer(grpo, {"run.name": "fresh"})
    fresh.setup()
    assert all(torch.equal(tensor, keep_engines["r"][name]) for name, tensor in weights(fresh).items())
    fresh.close()


SPARSE = {"rollout.log_probs_every_steps": 2, "algorithm.correction.level": "off", "rollout.weights": "own"}


def test_log_probs_of_every_second_step_measure_the_gap_there_and_change_no_weight(grpo, keep_engines):
    common = {**SPARSE, "run.steps": 3}
    sparse = trainer(grpo, {**common, "run.name": "sparse"})
    sparse.train()
    every = trainer(grpo, {**common, "run.name": "every", "rollout.log_probs_every_steps": 1})
    every.train()
    measured = [line.get("mismatch/mean_abs") for line in metrics_of(sparse)]
    assert [value is not None for value in measured] == [True, False, True]
    assert max(value for value in measured if value is not None) < 1e-4
    assert all(
        torch.equal(tensor, keep_engines["every"][name]) for name, tensor in keep_engines["sparse"].items()
    )


def test_a_sampler_with_other_weights_ends_the_run_in_a_step_that_has_log_probs(grpo):
    run = trainer(grpo, {**SPARSE, "rollout.max_log_prob_gap": 1e-12})
    with pytest.raises(TrainingFailed, match=r"rollout.max_log_prob_gap = 1e-12"):
        run.train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.correction.level": "auto"}, r"needed by algorithm.correction.level"),
        ({"algorithm.correction.mask": "token"}, r"needed by algorithm.correction.mask"),
        ({"algorithm.correction.bypass": True}, r"needed by algorithm.correction.bypass"),
        ({"rollout.over_sampling": 1.5}, r"needed by rollout.over_sampling"),
        ({"rollout.top_p": 0.9}, r"needed by rollout.top_p"),
        (
            {"schedule": {"algorithm.correction.cap": [(0, 2.0), (1, 3.0)]}},
            r"needed by algorithm.correction.cap",
        ),
        ({"trainer": "async"}, r"needed by trainer = 'async'"),
        ({"stage": [{"name": "replay_cache"}]}, r"needed by stage.replay_cache"),
    ],
)
def test_log_probs_that_something_reads_in_every_step_are_asked_for_in_every_step(grpo, changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer(grpo, {**SPARSE, **changes})


def test_gradients_that_stay_non_finite_end_the_run_with_the_weights_untouched(
    grpo, keep_engines, monkeypatch
):
    import engine_core.algorithms.losses as losses

    original = losses.ppo_clip
    monkeypatch.setattr(losses, "ppo_clip", lambda *a, **k: (original(*a, **k)[0] * float("nan"), {}))
    run = trainer(grpo, {"run.steps": 5})
    with pytest.raises(TrainingFailed, match=r"optimizer steps in a row .* not finite"):
        run.train()
    assert all(tensor.isfinite().all() for tensor in keep_engines["r"].values())


def test_equal_rewards_give_finite_metrics_and_no_gradient(grpo):
    run = trainer(grpo, rewards=[lambda completions: [1.0] * len(completions)])
    run.train()
    line = metrics_of(run)[0]
    assert line["actor/grad_norm"] == pytest.approx(0.0, abs=1e-6)
    assert line["reward/zero_variance_groups"] == pytest.approx(1.0)
    assert all(value == value for value in line.values() if isinstance(value, float))


def test_a_step_whose_rewards_all_fail_updates_nothing(grpo):
    def broken(completions):
        raise RuntimeError("no")

    run = trainer(grpo, {"run.steps": 1}, rewards=[broken])
    with pytest.raises(TrainingFailed):
        run.train()


def test_a_schedule_changes_settings_by_step(grpo):
    overrides = grpo | {
        "schedule": {"actor.optim.lr": [[0, 1e-3], [2, 1e-4]], "rollout.temperature": [[0, 1.0], [2, 0.5]]}
    }
    run = Trainer(load_config(overrides=overrides), rewards=[digits])
    run.train()
    lines = metrics_of(run)
    assert [line["actor/lr"] for line in lines] == [pytest.approx(1e-3), pytest.approx(1e-4)]
    assert lines[1]["actor/entropy"] < lines[0]["actor/entropy"]  # of softmax(logits / temperature)
    assert lines[1]["mismatch/max_abs"] < 1e-4  # both sides changed together


def test_live_objects_stand_for_names(grpo, world):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(world / "model"))
    rows = [{"prompt": f"Tom has {i} apples.", "answer": str(i)} for i in range(8)]
    settings = {k: v for k, v in grpo.items() if not k.startswith(("model.", "data.train"))}
    before = model.lm_head.weight.detach().clone()
    run = Trainer(
        load_config(overrides=settings),
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(world / "model"),
        rewards=[digits],
        data=rows,
    )
    run.train()
    assert not torch.equal(before, model.lm_head.weight.cpu())


def test_evaluation_scores_the_held_out_prompts_without_training(grpo):
    run = trainer(grpo)
    found = run.evaluate()
    assert found["eval/prompts"] == 8
    assert 0 <= found["eval/accuracy"] <= 1
    assert run.evaluate() == found  # greedy
    run.close()


def test_a_run_without_a_reward_is_refused_before_anything_is_built(grpo):
    with pytest.raises(ConfigError, match="reward"):
        Trainer(load_config(overrides=grpo))


def test_stages_filter_rollouts_and_an_empty_step_updates_nothing(grpo, run_file):
    plugin = """
from engine_core import hookimpl
from engine_core.specs import Stage

def none(rollouts, step):
    return [], {"dropped": float(len(rollouts))}

@hookimpl
def engine_stages():
    return {"none": Stage(load=none)}
"""
    path = run_file('plugins = ["drop.py"]\n[[stage]]\nname = "none"\n', drop=plugin)
    run = Trainer(load_config(path, grpo), rewards=[digits])
    run.train()
    assert metrics_of(run)[0]["stage/none/dropped"] == 16
    assert metrics_of(run)[0]["actor/empty_updates"] == 1


def test_an_observer_that_fails_is_counted_and_does_not_stop_the_run(grpo, run_file):
    plugin = """
from engine_core import hookimpl

@hookimpl
def engine_on_event(event, step):
    if event == "step_finished":
        raise RuntimeError("dashboard down")
"""
    path = run_file('plugins = ["watch.py"]\n', watch=plugin)
    run = Trainer(load_config(path, grpo), rewards=[digits])
    run.train()
    assert metrics_of(run)[1]["plugins/observer_failures"] == 1


def test_a_tokenizer_that_is_larger_than_the_model_is_refused_before_the_model_is_built(
    grpo, world, tmp_path
):
    config = json.loads((world / "model" / "config.json").read_text())
    folder = tmp_path / "small"
    shutil.copytree(world / "model", folder)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    run = trainer(grpo, {"model.path": str(folder)})
    with pytest.raises(DataError, match=r"100"):
        run.setup()
    assert run.groups == {}


def test_a_kl_that_the_schedule_raises_from_zero_has_its_reference(grpo):
    overrides = grpo | {"schedule": {"algorithm.kl_coef": [[0, 0.0], [2, 0.1]]}, "run.steps": 3}
    run = Trainer(load_config(overrides=overrides), rewards=[digits])
    run.train()
    assert metrics_of(run)[2]["actor/kl"] > 0


def test_a_run_with_code_files_is_resumed_and_exported_from_its_folder_alone(
    grpo, run_file, tmp_path, capsys
):
    from engine_core.cli.main import main

    watch = "from engine_core import hookimpl\n\n@hookimpl\ndef engine_on_event(event):\n    pass\n"
    reward = "def score(completions):\n    return [len(text) / 10 for text in completions]\n"
    text = """
plugins = ["watch.py"]
[[reward]]
name = "python"
[reward.python]
path = "mine.py"
allow_local_code = true
"""
    path = run_file(text, watch=watch, mine=reward)
    sets = [f"--set={key}={json.dumps(value)}" for key, value in grpo.items()]
    assert main(["train", str(path), *sets]) == 0
    folder = str(tmp_path / "runs" / "r")
    assert main(["resume", folder, "--steps", "3"]) == 0
    assert main(["export", folder, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_responses_that_end_at_once_are_learned_from_like_any_other(grpo):
    run = trainer(grpo, {"rollout.stop_token_ids": list(range(400)), "eval.at_end": True})
    run.train()
    lines = metrics_of(run)
    assert lines[0]["response_length/max"] == 1
    assert all(value == value and value is not None for value in lines[1].values())


def test_tokens_that_the_model_does_not_have_end_the_run_before_they_are_learned(grpo):
    run = trainer(grpo)
    run.text_config = SimpleNamespace(vocab_size=5, max_position_embeddings=512)
    with pytest.raises(
        PluginError, match=r"the model has 5 tokens \(vocab_size\)\. The weights were left alone"
    ):
        run.train()
    assert not run.weights_changed


def test_responses_that_the_models_positions_end_are_noted(grpo, caplog):
    run = trainer(grpo, {"model.override.max_position_embeddings": 24, "rollout.max_response_tokens": 32})
    run.train()
    assert (
        "positions of the model. Lower data.max_prompt_tokens or rollout.max_response_tokens" in caplog.text
    )


def test_after_training_the_trainer_holds_what_was_trained_and_trains_no_second_time(grpo, tmp_path):
    from safetensors.torch import load_file

    run = trainer(grpo)
    run.train()
    run.export(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    fresh = trainer(grpo, {"run.name": "fresh"})
    fresh.setup()
    assert any(not torch.equal(tensor, exported[name]) for name, tensor in weights(fresh).items())
    fresh.close()
    assert run.evaluate()["eval/prompts"] == 8
    with pytest.raises(ConfigError, match="has trained already"):
        run.train()
    run.close()
    with pytest.raises(ConfigError, match="closed after training"):
        run.evaluate()


def test_a_sampler_with_weights_of_its_own_has_those_of_the_checkpoint_it_evaluates(grpo, monkeypatch):
    from engine_core.local.engine_host import EngineHost

    monkeypatch.setattr(EngineHost, "_can_share", lambda self: False)
    run = trainer(grpo)
    run.train()
    run.close()
    checked = trainer(grpo, {"run.name": "other"})
    checked.load_checkpoint(run.folder.checkpoints / "step_00000002")
    sampler, actor = (checked.runtime.engines[name] for name in ("rollout", "actor"))
    sampled = sampler._module().state_dict()
    assert all(torch.equal(tensor, sampled[name]) for name, tensor in actor.named_weights())
    assert sampler.version == 2
    checked.close()


def test_optimizer_settings_changed_on_resume_hold_and_a_longer_run_follows_its_own_schedule(grpo):
    linear = {"actor.optim.schedule": "linear"}
    first = trainer(grpo, linear)
    first.train()
    second = trainer(grpo, linear | {"run.steps": 4, "actor.optim.lr": 2e-3, "actor.optim.weight_decay": 0.3})
    second.train(resume=first.folder.path)
    rates = [line["actor/lr"] for line in metrics_of(second)]
    assert rates == pytest.approx([1e-3, 5e-4, 2e-3 * 2 / 4, 2e-3 / 4])
    groups = second.runtime.engines["actor"].optimizer.param_groups
    assert groups[0]["weight_decay"] == 0.3
    second.close()


def test_too_few_rows_for_a_step_can_be_evaluated_and_sampled(grpo):
    run = trainer({k: v for k, v in grpo.items() if k != "run.steps"} | {"data.prompts_per_step": 1000})
    assert run.evaluate()["eval/prompts"] == 8
    assert len(run.generate(run.source.all(2))) == 8
    run.close()


def test_a_stage_that_makes_more_groups_gets_the_old_log_probs_it_needs(grpo, run_file):
    plugin = """
import dataclasses
from engine_core import hookimpl
from engine_core.specs import Stage

def twice(rollouts, step):
    return rollouts + [dataclasses.replace(r, group_id=r.group_id + 100) for r in rollouts], {}

@hookimpl
def engine_stages():
    return {"twice": Stage(load=twice)}
"""
    path = run_file('plugins = ["again.py"]\n[[stage]]\nname = "twice"\n', again=plugin)
    run = Trainer(load_config(path, grpo | {"algorithm.mini_batch_prompts": 4}), rewards=[digits])
    run.train()
    assert metrics_of(run)[0]["actor/approx_kl"] > 0  # the second update sees how far the first went
    assert metrics_of(run)[0]["mismatch/max_abs"] < 1e-4


@pytest.mark.parametrize(
    ("live", "message"),
    [
        ({"model": "demo/sft"}, r"model: got the text 'demo/sft'; expected the object itself.*model.path"),
        ({"data": "train.jsonl"}, r"data: got the text 'train.jsonl'.*data.train"),
        ({"rewards": digits}, "rewards: expected a list of functions"),
        ({"rewards": ["numeric"]}, r"A reward by name belongs in \[\[reward\]\]"),
    ],
)
def test_names_in_place_of_live_objects_are_refused_with_their_key(grpo, live, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(load_config(overrides=grpo), **live)
