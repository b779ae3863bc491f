"""generate and eval on a tiny model."""

from __future__ import annotations

import json
import re

import pytest

from engine_core.runs.rollout_files import read_rollouts


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
    assert engine("generate", "rl.toml", "few.parquet", "--set", "data.train=few.jsonl").code == 0
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


SETS = """
extends = ["rl.toml"]
[eval]
temperature = 1.0
samples_per_prompt = 3
k = [1, 3]
majority = "text"
pass_threshold = 2.0
at_end = true
[[eval.set]]
name = "few"
path = "few.jsonl"
max_prompts = 3
[[eval.set]]
name = "more"
path = "rows.jsonl"
max_prompts = 16
samples_per_prompt = 4
[run]
steps = 1
"""


@pytest.fixture
def with_sets(engine, rl_run):
    """Return a finished run that evaluated three sets."""
    (rl_run.parent / "few.jsonl").write_text("".join(f'{{"prompt": "{i}*{i}="}}\n' for i in range(5)))
    (rl_run.parent / "sets.toml").write_text(SETS)
    answer = engine("train", "sets.toml")
    assert answer.code == 0, answer.err
    assert re.search(r"acc \d\.\d\d ± \d\.\d\d  acc few ", answer.err)
    return rl_run.parent / "runs" / "first"


def test_eval_measures_every_set_as_training_does(engine, with_sets):
    line = json.loads((with_sets / "metrics.jsonl").read_text().splitlines()[-1])
    answer = engine("eval", str(with_sets), "--step", "1", "--json", "--out", "scores")
    assert answer.code == 0, answer.err
    metrics = json.loads(answer.out)
    assert metrics == {name: line[name] for name in metrics}
    assert (metrics["eval/few/prompts"], metrics["eval/more/prompts"], metrics["eval/prompts"]) == (3, 16, 2)
    assert "eval/more/mean@4" in metrics
    assert metrics["eval/few/pass@1"] <= metrics["eval/few/pass@3"]
    sampled = read_rollouts(with_sets.parents[1] / "scores" / "more.parquet")
    assert len(sampled) == 16 * 4
    inside = read_rollouts(with_sets / "rollouts" / "eval" / "more" / "step_000001.parquet")
    assert [r.text for r in inside] == [r.text for r in sampled]
    shown = engine("eval", "first").out
    assert re.search(r"^eval/few/accuracy +\d\.\d\d ± \d\.\d\d$", shown, re.MULTILINE)
    assert "_low" not in shown


def test_two_evaluations_are_compared_prompt_by_prompt(engine, with_sets):
    assert engine("eval", "first", "--out", "again", "--set", "run.seed=5").code == 0
    found = json.loads(engine("compare", "first", "again", "--json").out)
    assert set(found) == {"validation", "few", "more"}
    line = json.loads((with_sets / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("few", "more"):
        bounds = line[f"eval/{name}/accuracy_low"], line[f"eval/{name}/accuracy_high"]
        assert (found[name]["first"]["low"], found[name]["first"]["high"]) == pytest.approx(bounds)
    more = found["more"]
    assert more["difference"]["mean"] == pytest.approx(more["first"]["mean"] - more["second"]["mean"])
    assert more["difference"]["prompts"] == 16
    same = json.loads(engine("compare", "first", "first", "--json").out)["few"]["difference"]
    assert (same["mean"], same["low"], same["high"]) == (0, 0, 0)
    assert list(json.loads(engine("compare", "first", "again/few.parquet", "--json").out)) == ["few"]
    table = engine("compare", "again/few.parquet", "again/few.parquet").out
    assert table.splitlines()[0].split() == ["set", "first", "second", "difference", "prompts"]
    assert table.splitlines()[1].endswith("0.00 ± 0.00  3")


REFUSED = [
    ("compare again/few.parquet again/more.parquet", 4, "have no prompt in common"),
    ("compare first again --score digit", 4, "no rollout has the reward 'digit'. Did you mean 'digits'?"),
    ("compare first nowhere", 4, "No run at 'nowhere'"),
    (
        "eval run.toml --out new",
        2,
        "--out: trainer = 'sft' samples nothing, so there is nothing to write. Export the model",
    ),
    ("eval first --set eval.score=digit", 2, "eval.score: got 'digit', which is no reward of the run"),
    (
        "eval first --set eval.set.few.majority=digits",
        2,
        "eval.set.few.majority: got 'digits', expected one of",
    ),
    ("eval first --set eval.set.few.path=gone.jsonl", 4, "eval.set.few.path: there is no file"),
]


def test_what_cannot_be_evaluated_or_compared_is_refused(engine, with_sets):
    assert engine("eval", "first", "--out", "again").code == 0
    for words, code, message in REFUSED:
        answer = engine(*words.split())
        assert (answer.code, message in answer.err) == (code, True), f"{words}: {answer.err}"


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


def test_random_weights_are_warned_about_at_the_start_and_not_once_they_are_trained(engine, sft_run):
    assert "holds a config and no weights: random weights from model.seed" in engine("train", "run.toml").err
    for words in (["export", "first", "out"], ["eval", "first"], ["resume", "first", "--steps", "3"]):
        answer = engine(*words)
        assert answer.code == 0, answer.err
        assert "no weights" not in answer.err
