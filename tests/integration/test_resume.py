"""Stops, failed saves and changed configs, in whole runs of one process; processes that die are in tests/chaos."""

import json
import logging
import random
import re
import shutil

import numpy
import pytest
import torch
from variants import variants

from engine_core import Trainer, load_config
from engine_core.errors import ConfigError, DataError, EnvironmentProblem, SamplerLost
from engine_core.runs.checkpoint import Checkpoints, read_state
from engine_core.train.checkpointing import Resume

STEPS = 3


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def small(grpo):
    """Three steps, two updates each, evaluated after each, and a normalised reward: all state that a run has."""
    return grpo | {
        "run.steps": STEPS,
        "algorithm.mini_batch_prompts": 2,
        "eval.every_steps": 1,
        "eval.at_start": True,
        "actor.optim.schedule": "cosine",
        "rollout.max_response_tokens": 4,
    }


@pytest.fixture
def train(small):
    """Train with these changes; the trainer, closed."""

    def run(changes=None, resume=None):
        trainer = Trainer(
            load_config(overrides={**small, **(changes or {})}, allow_code=True), rewards=[digits]
        )
        try:
            trainer.train(resume=resume)
        finally:
            trainer.close()
        return trainer

    return run


@pytest.fixture
def fault(monkeypatch):
    def arm(text):
        monkeypatch.setenv("ENGINE_FAULT", text)

    return arm


def lines_of(folder):
    dropped = ("time", "throughput", "memory", "sync/seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(dropped)} for line in lines]


def final_state(folder):
    """Everything that the last checkpoint holds, as comparable values."""
    path = Checkpoints(folder / "checkpoints").latest()
    state = read_state(path)
    held = {key: state[key] for key in ("step", "data", "trainer", "random", "metrics")}
    held["metrics"] = {
        k: v for k, v in held["metrics"].items() if not k.startswith(("time", "throughput", "memory", "sync"))
    }
    files = {f.name: f.read_bytes() for f in sorted((path / "actor").iterdir())}
    return held, files


@pytest.fixture(scope="module")
def straight(world, tmp_path_factory):
    """Metrics and last checkpoint of the run that nothing interrupts."""
    known = {}

    def of(train, folder):
        if not known:
            trainer = train({"run.name": "straight"})
            known["lines"], known["final"] = lines_of(trainer.folder.path), final_state(trainer.folder.path)
        return known

    return of


STOPS = (
    *("step.begin", "step.begin@2", "step.generate@2", "step.reward@2", "step.log_probs@2", "step.train@2"),
    *("step.after_backward@3", "step.after_update@3", "step.after_update@4", "step.sync@2", "step.eval@1"),
    *("step.eval@3", "step.before_metrics@2", "step.after_metrics@3", "step.eval@4"),
)
OFTEN = ("step.generate@2", "step.after_update@3", "step.sync@2", "step.eval@3")


@pytest.mark.parametrize("point", variants(STOPS, OFTEN))
def test_a_stop_anywhere_saves_and_the_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    train, fault, straight, monkeypatch, tmp_path, point
):
    expected = straight(train, tmp_path)
    fault(f"{point}:term")
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 75
    monkeypatch.delenv("ENGINE_FAULT")
    resumed = train(resume=tmp_path / "runs" / "r")
    assert lines_of(resumed.folder.path) == expected["lines"]
    held, files = final_state(resumed.folder.path)
    if (
        point == "step.eval@4"
    ):  # the last step's checkpoint is from before its evaluation, and is never overwritten
        held["metrics"] = expected["final"][0]["metrics"]
    assert held == expected["final"][0]
    assert files == expected["final"][1]


def test_an_evaluation_that_was_stopped_is_done_under_the_settings_of_its_step(
    train, fault, monkeypatch, tmp_path
):
    changes = {"schedule": {"rollout.max_response_tokens": [[0, 4], [2, 7]]}, "run.steps": 2}
    straight = lines_of(train(changes | {"run.name": "straight"}).folder.path)
    fault("step.eval@3:term")  # of step 2
    with pytest.raises(SystemExit):
        train(changes)
    monkeypatch.delenv("ENGINE_FAULT")
    resumed = train(changes, resume=tmp_path / "runs" / "r")
    assert lines_of(resumed.folder.path) == straight
    assert straight[-1]["eval/response_length"] > 4
    again = Trainer(resumed.config, rewards=[digits])
    try:
        again.load_checkpoint(Checkpoints(resumed.folder.checkpoints).latest())
        assert again.evaluate()["eval/response_length"] == straight[-1]["eval/response_length"]
    finally:
        again.close()


def test_a_sampler_lost_in_an_evaluation_leaves_its_step_saved_and_the_resume_evaluates_it(
    train, monkeypatch, tmp_path
):
    evaluate = Trainer.evaluate

    def lost(trainer, out=None):
        if trainer.step_done == 2:
            raise SamplerLost("A sampler was lost.")
        return evaluate(trainer, out)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lost)
        with pytest.raises(SamplerLost):
            train()
    folder = tmp_path / "runs" / "r"
    assert [path.name for path in folder.glob("checkpoints/step_*")] == ["step_00000002"]
    train(resume=folder)
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all("eval/reward_mean" in line for line in lines)


def test_a_failure_names_the_step_that_it_happened_in(train, fault, caplog):
    fault("step.eval@3:raise")  # at the start, after step 1, after step 2
    with pytest.raises(RuntimeError):
        train()
    assert "The run failed in step 2. No checkpoint was saved" in caplog.text


def test_a_stop_does_no_further_step_and_names_the_way_on(train, fault, caplog, tmp_path):
    fault("step.generate@2:int")
    with caplog.at_level(logging.INFO, "engine"), pytest.raises(KeyboardInterrupt):
        train()
    folder = tmp_path / "runs" / "r"
    assert [line["step"] for line in lines_of(folder)] == [0, 1]
    assert Checkpoints(folder / "checkpoints").steps() == [1]
    assert (
        f"Stopped by Ctrl-C after step 1. The newest checkpoint is of step 1. Resume: engine resume {folder}"
        in caplog.text
    )


def test_a_stop_before_the_models_are_built_saves_nothing(train, fault, tmp_path):
    fault("run.setup:term")
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143
    assert Checkpoints(tmp_path / "runs" / "r" / "checkpoints").steps() == []


def test_a_save_that_fails_is_a_warning_with_the_space_and_the_next_one_succeeds(train, fault, caplog):
    fault("checkpoint.after_role@2:nospace")
    run = train({"checkpoint.every_steps": 1, "checkpoint.keep_last": 9})
    assert Checkpoints(run.folder.checkpoints).steps() == [1, 3]
    said = re.search(r"Step 2 could not be saved: .*No space left on device.*", caplog.text)[0]
    assert re.search(r"A checkpoint needs [\d.]+ MB, [\d,.]+ MB are free", said)
    assert "The checkpoint of step 1 is untouched. Training continues" in said
    assert list(run.folder.checkpoints.glob(".step_*")) == []


OBSERVER = """
from engine_core import hookimpl


@hookimpl
def engine_on_event(event, step, data):
    if event.startswith("checkpoint_"):
        print(event, step, data.get("failures"))
"""


def test_a_save_that_fails_is_an_event(train, fault, tmp_path, capsys):
    (tmp_path / "observer.py").write_text(OBSERVER)
    fault("checkpoint.after_role@2:nospace")
    train({"checkpoint.every_steps": 1, "plugins": [str(tmp_path / "observer.py")]})
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint_")]
    assert said == ["checkpoint_saved 1 None", "checkpoint_failed 2 1", "checkpoint_saved 3 None"]


def test_saves_that_keep_failing_end_the_run(train, fault, tmp_path):
    fault("checkpoint.begin@2:nospace,checkpoint.begin@3:ioerror")
    with pytest.raises(
        EnvironmentProblem, match=r"Step 3 .*Input/output error.*step 1 is untouched.*\(2 times in a row"
    ):
        train({"checkpoint.every_steps": 1, "checkpoint.max_failures": 2, "run.steps": 4})
    assert Checkpoints(tmp_path / "runs" / "r" / "checkpoints").latest().name == "step_00000001"


def test_the_last_save_must_not_fail(train, fault):
    fault("checkpoint.begin:nospace")
    with pytest.raises(EnvironmentProblem, match="Step 3 could not be saved"):
        train()


def test_a_stop_that_cannot_save_does_not_claim_to_have(train, fault, caplog):
    fault("step.generate@2:term,checkpoint.begin:nospace")
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143
    assert "Step 1 could not be saved" in caplog.text


def test_the_best_checkpoint_is_saved_when_it_comes_and_stays(train, monkeypatch):
    values = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"eval/accuracy": next(values)})
    best = {"checkpoint.best_metric": "eval/accuracy", "checkpoint.keep_last": 1, "eval.at_start": False}
    run = train(best | {"run.steps": 5})
    assert Checkpoints(run.folder.checkpoints).steps() == [2, 5]  # 1 was the best, then 2


def test_a_resumed_run_knows_the_best_so_far(train, monkeypatch):
    best = {"checkpoint.best_metric": "eval/accuracy", "checkpoint.keep_last": 1, "eval.at_start": False}
    values = iter([0.9, 0.2, 0.1, 0.3, 0.4])
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"eval/accuracy": next(values)})
    run = train(best | {"run.steps": 3})
    again = train(best | {"run.steps": 5}, resume=run.folder.path)
    assert Checkpoints(again.folder.checkpoints).steps() == [1, 5]


def test_the_best_step_stays_though_it_was_saved_before_its_evaluation(train, fault, monkeypatch, tmp_path):
    best = {"checkpoint.best_metric": "eval/accuracy", "checkpoint.keep_last": 1, "eval.at_start": False}
    accuracy = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3}
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"eval/accuracy": accuracy[self.step_done]})
    fault("step.eval@2:term")
    with pytest.raises(SystemExit):
        train(best | {"run.steps": 4})
    monkeypatch.delenv("ENGINE_FAULT")
    again = train(best | {"run.steps": 4, "checkpoint.every_steps": 1}, resume=tmp_path / "runs" / "r")
    assert Checkpoints(again.folder.checkpoints).steps() == [2, 4]


def test_the_clock_saves_too(train):
    run = train({"checkpoint.every_minutes": 1e-9, "checkpoint.keep_last": 9})
    assert Checkpoints(run.folder.checkpoints).steps() == [1, 2, 3]


def test_an_allowed_change_is_listed_and_used(train, caplog):
    first = train()
    with caplog.at_level(logging.INFO, "engine"):
        second = train({"run.steps": 4, "actor.optim.lr": 5e-4}, resume=first.folder.path)
    assert "Changed since step_00000003: run.steps: 3 -> 4 (allowed)" in caplog.text
    assert "actor.optim.lr: 0.001 -> 0.0005 (allowed)" in caplog.text
    assert lines_of(second.folder.path)[-1]["step"] == 4


def test_a_change_of_the_batch_is_a_warning(train, caplog):
    first = train()
    train({"run.steps": 4, "rollout.group_size": 2}, resume=first.folder.path)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("rollout.group_size: 4 -> 2 (warned" in message for message in warned)


@pytest.mark.parametrize("key", ["model.override.num_hidden_layers", "model.path"])
def test_a_change_of_the_model_is_refused_and_the_run_is_as_it_was(train, world, tmp_path, key):
    first = train()
    before = (first.folder.path / "metrics.jsonl").read_bytes()
    shutil.copytree(world / "model", tmp_path / "moved")
    now = {"model.path": str(tmp_path / "moved"), "model.override.num_hidden_layers": 1}[key]
    with pytest.raises(ConfigError, match=rf"{key}: the checkpoint was written with .*--force {key}"):
        train({"run.steps": 5, key: now}, resume=first.folder.path)
    assert (first.folder.path / "metrics.jsonl").read_bytes() == before
    if key == "model.path":  # the same model elsewhere: meant
        forced = train({"run.steps": 4, key: now}, resume=Resume.find(first.folder.path, force=[key]))
        assert lines_of(forced.folder.path)[-1]["step"] == 4


def test_another_tokenizer_is_refused_before_the_model_is_built(train, world, tmp_path, monkeypatch):
    shutil.copytree(world / "model", tmp_path / "mine")
    first = train({"model.path": str(tmp_path / "mine")})
    file = tmp_path / "mine" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"model\.tokenizer: the tokenizer is not the one of step_00000003"):
        train({"model.path": str(tmp_path / "mine"), "run.steps": 4}, resume=first.folder.path)


def test_data_with_other_rows_is_refused_and_the_run_is_as_it_was(train, world, tmp_path):
    mine = tmp_path / "train.jsonl"
    rows = (world / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    mine.write_text("".join(rows))
    first = train({"data.train": str(mine)})
    before = (first.folder.path / "metrics.jsonl").read_bytes()
    mine.write_text("".join(rows[:-1]))
    with pytest.raises(DataError, match="The data changed since the checkpoint"):
        train({"data.train": str(mine), "run.steps": 4}, resume=first.folder.path)
    assert (first.folder.path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "role"),
    [
        ({"algorithm.advantage": "gae"}, "critic"),
        ({"algorithm.kl_coef": 0.1, "algorithm.ref_refresh_steps": 1}, "ref"),
    ],
)
def test_a_role_that_the_checkpoint_has_not_is_a_new_run(train, change, role):
    first = train()
    with pytest.raises(ConfigError, match=rf"holds no role '{role}'.*engine export RUN OUT"):
        train({"run.steps": 4, **change}, resume=first.folder.path)


def test_another_reference_for_a_run_that_has_one_is_refused_also_where_it_was_the_default(
    train, world, tmp_path
):
    shutil.copytree(world / "model", tmp_path / "other")
    first = train({"algorithm.kl_coef": 0.1})
    with pytest.raises(
        ConfigError, match=r"ref\.path: the checkpoint was written with unset.*--force ref\.path"
    ):
        train(
            {"run.steps": 4, "algorithm.kl_coef": 0.1, "ref.path": str(tmp_path / "other")},
            resume=first.folder.path,
        )


def test_a_secret_of_the_config_is_not_in_the_log_of_a_resume(train, monkeypatch, tmp_path):
    step = Trainer.step

    def telling(trainer, number):
        logging.getLogger("engine").warning("The password is geheimnis.")
        return step(trainer, number)

    monkeypatch.setattr(Trainer, "step", telling)
    changes = {"rollout.stop": ["https://me:geheimnis@example.com/"], "checkpoint.every_steps": 1}
    train(changes | {"run.steps": 1})
    train(changes | {"run.steps": 2}, resume=tmp_path / "runs" / "r")
    for attempt in range(2):
        text = (tmp_path / "runs" / "r" / "logs" / f"attempt_{attempt}" / "run.log").read_text()
        assert "The password is [redacted]." in text
        assert "geheimnis" not in text


def test_an_export_does_not_care_for_the_rows_of_the_data(train, small, world, tmp_path):
    mine = tmp_path / "train.jsonl"
    rows = (world / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    mine.write_text("".join(rows))
    first = train({"data.train": str(mine)})
    mine.write_text("".join(rows[:-1]))
    trainer = Trainer(load_config(overrides={**small, "data.train": str(mine)}), rewards=[digits])
    trainer.load_checkpoint(Checkpoints(first.folder.checkpoints).latest())
    trainer.export(tmp_path / "out")
    trainer.close()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_strict_takes_no_older_checkpoint(train):
    run = train({"checkpoint.every_steps": 1})
    newest = run.folder.checkpoints / "step_00000003" / "actor" / "weights.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    with pytest.raises(DataError, match=r"actor/weights\.safetensors does not match its hash.*--strict"):
        Resume.find(run.folder.path, strict=True)
    assert Resume.find(run.folder.path).state["step"] == 2


def test_a_reward_that_draws_numbers_draws_the_same_after_a_stop(small, fault, monkeypatch, tmp_path):
    def drawing(completions):
        return [random.random() + float(numpy.random.rand()) + float(torch.rand(())) for _ in completions]

    def run(name, resume=None):
        trainer = Trainer(load_config(overrides={**small, "run.name": name}), rewards=[drawing])
        try:
            trainer.train(resume=resume)
        finally:
            trainer.close()
        return lines_of(trainer.folder.path)

    def seed():
        random.seed(5)
        numpy.random.seed(5)

    seed()
    expected = run("straight")
    seed()
    fault("step.log_probs@2:term")  # the reward of step 2 has drawn its numbers by then
    with pytest.raises(SystemExit):
        run("stopped")
    monkeypatch.delenv("ENGINE_FAULT")
    assert run("stopped", resume=tmp_path / "runs" / "stopped") == expected
