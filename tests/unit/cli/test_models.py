"""generate, eval, export, on a tiny model."""

from __future__ import annotations

import json

import pytest

from engine_core.rollout_files import read_rollouts


@pytest.fixture
def trained(engine, sft_run):
    assert engine("train", "run.toml", "--set", "actor.optim.lr=0.01").code == 0
    return sft_run.parent / "runs" / "first"


def test_generate_writes_scored_groups_that_offline_training_can_read(engine, rl_run):
    answer = engine("generate", "rl.toml", "out/rollouts.parquet")
    assert answer.code == 0
    assert answer.out == "out/rollouts.parquet\n"
    rollouts = read_rollouts(rl_run.parent / "out" / "rollouts.parquet")
    assert len(rollouts) == 16 * 3
    assert sorted({(r.group_id, r.index) for r in rollouts}) == [(g, i) for g in range(16) for i in range(3)]
    assert {r.prompt.text for r in rollouts if r.group_id == 0} == {rollouts[0].prompt.text}
    assert all(r.reward == sum(c.isdigit() for c in r.text) for r in rollouts)
    assert not (rl_run.parent / "runs").exists()


def test_generate_takes_other_prompts(engine, rl_run):
    (rl_run.parent / "few.jsonl").write_text('{"prompt": "7*7="}\n{"prompt": "8-1="}\n')
    assert engine("generate", "rl.toml", "few.parquet", "--prompts", "few.jsonl").code == 0
    prompts = {r.prompt.text for r in read_rollouts(rl_run.parent / "few.parquet")}
    assert prompts == {"7*7=", "8-1="}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rl.toml", "out.json"], "OUT 'out.json' must end in .parquet"),
        (["rl.toml", "rows.parquet"], "'rows.parquet' exists already, and nothing is overwritten"),
        (["run.toml", "out.parquet"], "trainer = 'sft' samples nothing"),
    ],
)
def test_generate_refuses_before_it_samples(engine, rl_run, words, message):
    (rl_run.parent / "rows.parquet").write_text("mine")
    answer = engine("generate", *words)
    assert answer.code == 2
    assert message in answer.err
    assert (rl_run.parent / "rows.parquet").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_refused_before_any_work(engine, trained):
    for words in (["generate", "run.toml", "rows.jsonl/out.parquet"], ["export", "first", "rows.jsonl/out"]):
        answer = engine(*words)
        assert answer.code == 5
        assert (
            f"'{words[2]}' cannot be made: '{trained.parents[1] / 'rows.jsonl'}' is no folder." in answer.err
        )


def test_eval_of_a_file_is_its_model_and_of_a_run_is_its_checkpoint(engine, trained):
    before = json.loads(engine("eval", "run.toml", "--json").out)["eval/nll"]
    first = json.loads(engine("eval", "first", "--step", "1", "--json").out)["eval/nll"]
    last = json.loads(engine("eval", trained, "--json").out)["eval/nll"]
    assert before > first > last
    assert engine("eval", "first").out == f"eval/nll  {last:.6g}\n"


def test_eval_scores_with_the_rewards(engine, rl_run):
    assert engine("train", "rl.toml").code == 0
    answer = engine("eval", "first", "--json", "--allow-code")
    assert answer.code == 0
    metrics = json.loads(answer.out)
    assert metrics["eval/prompts"] == 2
    assert metrics["eval/digits"] == metrics["eval/reward_mean"]


def test_a_step_without_a_checkpoint_lists_those_there_are(engine, trained):
    for words in (["eval", "first", "--step", "9"], ["export", "first", "out", "--step", "9"]):
        answer = engine(*words)
        assert answer.code == 4
        assert answer.err == "engine: --step 9: first has no checkpoint of that step. It has: 1, 2.\n"
    answer = engine("eval", "run.toml", "--step", "1")
    assert answer.code == 2
    assert "only a run has checkpoints" in answer.err


def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_otherwise(engine, trained):
    state = trained / "checkpoints" / "step_00000002" / "state.json"
    state.write_text(state.read_text().replace(" 2", " 3"))
    answer = engine("eval", "first", "--step", "2")
    assert answer.code == 4
    assert "state.json does not match its hash. Choose another of [1, 2]." in answer.err
    passed = engine("eval", "first", "--json")
    assert json.loads(passed.out) == json.loads(engine("eval", "first", "--step", "1", "--json").out)


def test_export_is_a_folder_that_transformers_loads(engine, trained):
    answer = engine("export", "first", "exported", "--step", "1")
    assert answer.code == 0
    assert answer.out == "exported\n"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = trained.parents[1] / "exported"
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(out).decode([14, 15]) == "lm"
    again = engine("export", "first", "exported")
    assert again.code == 2
    assert "'exported' exists already" in again.err
