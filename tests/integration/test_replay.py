"""``engine replay``: a step done again gives the numbers that were recorded, and touches nothing of its run."""

import hashlib
import json
import shutil

import pytest

from engine_core import Trainer, load_config
from engine_core.cli.main import main
from engine_core.errors import ConfigError, DataError, TrainingFailed
from engine_core.runs.tracking import RunFolder
from engine_plugin_tools.replaying import find_start, replay
from engine_plugin_trainers.sft import SFTTrainer


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def small(grpo):
    """Four steps, two updates each, against a reference that follows, with weights that adapt and a schedule."""
    return grpo | {
        "run.steps": 4,
        "rollout.max_response_tokens": 5,
        "rollout.group_size": 2,
        "algorithm.mini_batch_prompts": 2,
        "algorithm.kl_coef": 0.1,
        "algorithm.kl_target": 0.01,
        "algorithm.ref_refresh_steps": 2,
        "actor.optim.schedule": "cosine",
        "checkpoint.every_steps": 2,
        "schedule": {"algorithm.entropy_coef": [[0, 0.0], [3, 0.01]], "actor.optim.lr": [[0, 1e-2], [2, 2e-2]]},
    }  # fmt: skip


def trained(settings, kind=Trainer, rewards=(digits,)):
    run = kind(load_config(overrides=settings), **({"rewards": list(rewards)} if rewards else {}))
    run.train()
    run.close()
    return RunFolder.open(run.folder.path)


def again(settings, folder, step, kind=Trainer, rewards=(digits,)):
    run = kind(load_config(overrides=settings), **({"rewards": list(rewards)} if rewards else {}))
    try:
        return replay(run, folder, step, find_start(run, folder, step))
    finally:
        run.close()


def content(folder):
    return {
        str(file.relative_to(folder)): (
            file.stat().st_mtime_ns,
            hashlib.sha256(file.read_bytes()).hexdigest(),
        )
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def assert_equal(done, least=("actor/loss", "actor/grad_norm", "actor/lr", "mismatch/kl")):
    rows = done.rows()
    assert {name for name, _, _ in rows} >= set(least)
    assert [row for row in rows if row[1] != row[2]] == []


def test_every_step_gives_its_recorded_numbers_exactly(small):
    folder = trained(small)
    before = content(folder.path)
    for step, (checkpoint, between) in {1: (0, []), 2: (0, [1]), 3: (2, []), 4: (2, [3])}.items():
        done = again(small, folder, step)
        assert (done.start.step, done.start.again, done.start.left_out) == (checkpoint, between, [])
        assert_equal(done, ("actor/loss", "actor/grad_norm", "actor/lr", "actor/kl", "actor/kl_coef"))
    assert content(folder.path) == before


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"algorithm.advantage": "gae", "algorithm.epochs": 2}, "critic/loss"),
        ({"algorithm.advantage": "remax"}, "actor/loss"),
        ({"stage": [{"name": "replay_cache"}]}, "mismatch/fresh_mean_abs"),
        ({"stage": [{"name": "pf_ppo_resample"}]}, "actor/clip_fraction"),
    ],
    ids=["gae", "remax", "replay_cache", "pf_ppo_resample"],
)
def test_what_a_step_needs_besides_tokens_is_stored_too(small, changes, metric):
    folder = trained(small | changes | {"run.steps": 3})
    for step in (2, 3):
        assert_equal(
            again(small | changes | {"run.steps": 3}, folder, step), ("actor/loss", "actor/grad_norm", metric)
        )


def test_without_a_checkpoint_it_begins_with_the_model_and_learns_all_steps_before(small):
    folder = trained(small)
    shutil.rmtree(folder.checkpoints)
    done = again(small, folder, 3)
    assert (done.start.checkpoint, done.start.again) == (None, [1, 2])
    assert str(done.start).startswith(
        "from the model: there is no checkpoint of an earlier step; steps 1 to 2 learned again"
    )
    assert_equal(done)


def test_a_damaged_checkpoint_is_passed_over(small):
    folder = trained(small)
    (folder.checkpoints / "step_00000002" / "state.json").write_text("{}")
    done = again(small, folder, 4)
    assert done.start.step == 0
    assert_equal(done)


def test_steps_whose_rollouts_were_not_kept_are_left_out_and_that_is_said(small):
    folder = trained(small | {"tracking.rollouts_every_steps": 2})
    done = again(small, folder, 4)
    assert (done.start.step, done.start.again, done.start.left_out) == (2, [], [3])
    assert "step 3 left out, so the numbers are not those of the run" in str(done.start)
    assert done.metrics["actor/loss"] != done.recorded["actor/loss"]
    with pytest.raises(
        DataError, match=r"No rollouts at .*step_000003.*holds step_000002.parquet to step_000004"
    ):
        again(small, folder, 3)


def test_a_step_that_failed_can_be_done_again(small):
    """The replayed half of its second step is masked, which is more than may be."""
    bad = small | {"stage": [{"name": "replay_cache"}], "algorithm.correction.max_masked_share": 0.1}
    bad |= {"algorithm.correction.mask": "token", "algorithm.correction.mask_low": 0.999}
    bad |= {"algorithm.correction.mask_high": 1.001}
    with pytest.raises(TrainingFailed, match="The correction masked"):
        trained(bad)
    folder = RunFolder.open(f"{small['run.dir']}/r")
    assert [line["step"] for line in folder.read_metrics()] == [1]
    with pytest.raises(TrainingFailed, match="The correction masked"):
        again(bad, folder, 2)
    done = again(bad | {"algorithm.correction.max_masked_share": 1.0}, folder, 2)
    assert done.recorded == {}
    assert done.metrics["correction/masked_share"] > 0


def test_a_changed_setting_changes_the_numbers_and_one_that_does_not_fit_is_refused(small):
    folder = trained(small)
    done = again(small | {"algorithm.advantage": "dr_grpo"}, folder, 3)
    assert done.metrics["actor/grad_norm"] != done.recorded["actor/grad_norm"]
    with pytest.raises(ConfigError, match=r"model.override.*--force"):
        again(small | {"model.override": {"num_hidden_layers": 1}}, folder, 3)


def test_a_trainer_that_samples_nothing_is_replayed_from_its_data(world, tmp_path):
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "trainer": "sft",
        "model.path": str(world / "model"),
        "data.train": str(tmp_path / "rows.jsonl"),
        "data.prompts_per_step": 3,
        "run.dir": str(tmp_path / "runs"),
        "run.name": "s",
        "checkpoint.every_steps": 2,
        "tracking.trackers": [],
    }
    folder = trained(settings, SFTTrainer, ())
    for step in (2, 4):
        done = again(settings, folder, step, kind=SFTTrainer, rewards=())
        assert_equal(done, ("actor/nll", "actor/grad_norm", "tokens/total"))


@pytest.fixture
def run_file(small, tmp_path, monkeypatch):
    """A finished run ``runs/r``, made and looked at by the command line."""
    monkeypatch.chdir(tmp_path)
    from engine_core.config.dump import dump_toml

    settings = small | {"reward": [{"name": "length", "length": {"max_tokens": 5, "buffer_tokens": 3}}]}
    (tmp_path / "run.toml").write_text(dump_toml(load_config(overrides=settings)))
    assert main(["train", "run.toml"]) == 0
    return tmp_path / "runs" / "r"


def test_the_command_prints_both_numbers_and_where_it_began(run_file, capsys):
    before = content(run_file)
    capsys.readouterr()
    assert main(["replay", "r", "--step", "4"]) == 0
    shown = capsys.readouterr()
    assert (
        f"step 4 of {run_file}, from {run_file}/checkpoints/step_00000002; step 3 learned again on the way"
        in shown.out
    )
    lines = shown.out.splitlines()[1:]
    assert lines[0].split() == ["METRIC", "RECORDED", "AGAIN"]
    table = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert table["actor/grad_norm"][2] == "equal"
    assert all(cells[-1] == "equal" for cells in table.values())
    assert main(["replay", "r", "--step", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["learned_again"], told["left_out"], told["changed"]) == (4, [3], [], [])
    loss = told["metrics"]["actor/loss"]
    assert loss["recorded"] == loss["again"]
    assert main(["replay", "latest", "--step", "3", "--set", "actor.optim.max_grad_norm=0.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["changed"] == ["actor.optim.max_grad_norm: 1.0 -> 0.5"]
    assert (
        main(["replay", "latest", "--step", "3", "--set", "algorithm.loss_aggregation=seq-mean-token-sum"])
        == 0
    )
    assert "The first part that differs: the loss or an update (actor/loss: " in capsys.readouterr().out
    assert content(run_file) == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--step", "9"], 4, "--step 9: r has come to step 4."),
        (["--step", "0"], 2, "'--step'"),
        (["--step", "3", "--set", "model.override.num_hidden_layers=1"], 2, "a checkpoint fits the model that wrote it"),
        (["--step", "3", "--set", "actor.optim.lrr=1"], 2, "Did you mean 'lr'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_again_is_refused(run_file, capsys, words, code, said):
    assert main(["replay", "r", *words]) == code
    assert said in capsys.readouterr().err
