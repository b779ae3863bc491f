"""examples/expert_iteration: a data flow of one's own in a file, through the real command line and the real trainer."""

import json
import statistics
from pathlib import Path

import pytest

from engine_core import load_config
from engine_core.cli.main import main
from engine_core.config.assemble import plugins_for
from engine_core.runs.rollout_files import read_rollouts

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert_iteration"


def early(completions):
    """Share of characters that are letters up to m: a reward with a spread for a random model."""
    return [sum("a" <= c <= "m" for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def make(grpo):
    def trainer(changes=None):
        own = {k: v for k, v in grpo.items() if not k.startswith("algorithm")}
        config = load_config(EXAMPLE / "run.toml", overrides=own | {"reward": [], **(changes or {})})
        return plugins_for(config).resolve("trainers", "expert_iteration")(config, rewards=[early])

    return trainer


def lines_of(run):
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


def test_its_class_and_hook_are_some_twenty_lines():
    lines = (EXAMPLE / "expert_iteration.py").read_text().splitlines()
    start = lines.index("class ExpertIteration(SampledRun):")
    assert len([line for line in lines[start:] if line.strip()]) <= 22


def test_the_page_shows_the_files_as_they_are():
    page = (EXAMPLE.parents[1] / "docs" / "custom_trainers.md").read_text("utf-8")
    for language, name in (("python", "expert_iteration.py"), ("toml", "run.toml")):
        shown = page.split(f"```{language} examples/expert_iteration/{name}\n")[1].split("```")[0]
        assert shown == (EXAMPLE / name).read_text("utf-8")


def test_it_raises_the_mean_reward(make):
    run = make({"run.steps": 25, "data.prompts_per_step": 8, "actor.optim.lr": 0.01})
    run.train()
    run.close()
    rewards = [line["reward/mean"] for line in lines_of(run)]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.1


def test_it_learns_the_best_of_each_group_as_supervised_fine_tuning_does(make):
    run = make({"run.steps": 1})
    learned = []
    original = run.learn
    run.learn = lambda batch, loss: learned.append((batch, loss)) or original(batch, loss)
    run.train()
    ((batch, loss),) = learned
    rollouts = read_rollouts(run.folder.rollout_file(1))
    groups = {group: [r for r in rollouts if r.group_id == group] for group in range(4)}
    best = [max(members, key=lambda r: r.reward) for members in groups.values()]
    assert batch.lengths.tolist() == [len(r.token_ids) for r in best]
    assert batch.token_ids.tolist() == [token for r in best for token in r.token_ids.tolist()]
    assert loss.name == "nll"
    (line,) = lines_of(run)
    assert line["expert/reward"] == pytest.approx(statistics.fmean(r.reward for r in best))
    sampled = [float(p) for r in best for p in r.rollout_log_probs[r.loss_mask]]
    assert line["actor/nll"] == pytest.approx(-statistics.fmean(sampled), rel=1e-5)
    assert line["policy_version"] == 1
    run.close()


def test_it_is_stopped_resumed_and_evaluated_like_any_other(make, monkeypatch, world, tmp_path):
    changes = {"run.steps": 3, "eval.at_end": True}
    straight = make(changes | {"run.name": "straight"})
    straight.train()
    straight.close()
    monkeypatch.setenv("ENGINE_FAULT", "step.train@3:term")
    with pytest.raises(SystemExit):
        make(changes).train()
    monkeypatch.delenv("ENGINE_FAULT")
    resumed = make(changes)
    resumed.train(resume=tmp_path / "runs" / "r")
    resumed.close()
    ends = [
        [(line["actor/loss"], line["reward/mean"]) for line in lines_of(run)] for run in (straight, resumed)
    ]
    assert ends[0] == ends[1]
    assert lines_of(resumed)[-1]["eval/reward_mean"] == lines_of(straight)[-1]["eval/reward_mean"]


def test_the_command_line_takes_it(world, tmp_path, capsys):
    settings = {
        "model.path": str(world / "model"),
        "data.train": str(world / "data" / "train.jsonl"),
        "run.dir": str(tmp_path / "runs"),
        "run.steps": 1,
        "data.prompts_per_step": 2,
        "rollout.group_size": 2,
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    assert main(["validate", str(EXAMPLE / "run.toml"), *sets]) == 0
    assert "trainer 'expert_iteration'" in capsys.readouterr().out
    assert main(["train", str(EXAMPLE / "run.toml"), *sets]) == 0
    assert main(["validate", str(EXAMPLE / "run.toml"), *sets, "--set", "algorithm.loss=cispo"]) == 0
    assert "[algorithm]: trainer 'expert_iteration' does not read it" in capsys.readouterr().out
