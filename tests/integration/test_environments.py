"""Whole runs with an environment: what is learned, evaluated, saved and shown."""

import json
import re
from pathlib import Path

import pytest
import torch

from engine_core import Trainer, load_config
from engine_core.cli.main import main
from engine_core.errors import ConfigError, EngineError
from engine_core.rewards.signatures import OFFERED
from engine_core.runs.rollout_files import read_rollouts

pytestmark = pytest.mark.usefixtures("forked_workers")

DATA_PARALLEL = Path(__file__).parents[1] / "conformance" / "data_parallel_plugin.py"

PLUGIN = '''
from engine_core import hookimpl
from engine_core.specs import Environment, Options


class EchoOptions(Options):
    turns: int = 3
    """Times that the policy is asked."""


async def echo(episode, turns):
    for number in range(turns):
        turn = await episode.sample(max_tokens=3 + number)
        if number < turns - 1:
            answer = await episode.call(str.upper, turn.text)
            episode.append(f" ({answer}) ")
    return episode.rollout({"short": float(len(turn.text) < 8), "seen": len(turn.text)})


@hookimpl
def engine_environments():
    return {"echo": Environment(load=echo, config=EchoOptions, rewards=frozenset({"short", "seen"}))}
'''


@pytest.fixture
def multi(grpo, tmp_path):
    """Settings of a run with the environment."""
    (tmp_path / "echo.py").write_text(PLUGIN)
    return grpo | {
        "plugins": [str(tmp_path / "echo.py")],
        "environment": {
            "name": "echo",
            "reward_weights": {"seen": 0.0},
            "max_turns": 4,
            "echo": {"turns": 3},
        },
        "eval.at_end": True,
        "model.override": {"max_position_embeddings": 256},
    }


def train(settings, **more):
    trainer = Trainer(load_config(settings | more, allow_code=True))
    return trainer, trainer.train()


def test_what_was_sampled_has_the_log_probs_of_one_pass_over_the_whole_sequence(multi):
    """Independent of the engine: transformers' own model, one sequence at a time, teacher forced."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    trainer = Trainer(load_config(multi, {"rollout.temperature": 0.7, "rollout.top_k": 20}, allow_code=True))
    rollouts = trainer.generate(trainer_prompts(trainer, 3))
    folder = multi["run.dir"] + "/exported"
    trainer.export(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert len(rollouts) == 12
    for rollout in rollouts:
        with torch.no_grad():
            logits = model(rollout.token_ids[None]).logits[0, :-1] / 0.7
        learned = rollout.loss_mask[1:]
        whole = logits.log_softmax(-1).gather(1, rollout.token_ids[1:, None])[:, 0]
        cut = logits.masked_fill(logits < logits.topk(20).values[:, -1:], -torch.inf).log_softmax(-1)
        kept = cut.gather(1, rollout.token_ids[1:, None])[:, 0]
        assert learned.sum() >= 3
        torch.testing.assert_close(rollout.rollout_log_probs[1:][learned], kept[learned], rtol=0, atol=2e-5)
        summed = rollout.rollout_log_probs + rollout.extras["support_log_mass"]
        torch.testing.assert_close(summed[1:][learned], whole[learned], rtol=0, atol=2e-5)
        assert not rollout.rollout_log_probs[~rollout.loss_mask].any()
        edges = rollout.loss_mask.int().diff()
        assert [(edges == 1).sum().item(), (edges == -1).sum().item()] == [3, 2]  # three turns, two answers
        assert rollout.extras["turns"].diff().clamp(min=0).sum() == 3
    trainer.close()


def trainer_prompts(trainer, count):
    trainer.setup()
    return trainer.source.all()[:count]


@pytest.mark.parametrize("tools", ["({'name': 'upper'},)", "lambda options: ({'name': 'upper'},)"])
def test_tools_that_the_template_does_not_show_are_refused_and_can_be_turned_off(multi, tmp_path, tools):
    declared = PLUGIN.replace("Environment(", f"Environment(tools={tools}, ")
    (tmp_path / "echo.py").write_text(declared)
    with pytest.raises(EngineError, match=r"declares tools"):
        Trainer(load_config(multi, allow_code=True)).setup()
    trainer = Trainer(load_config(multi | {"data.columns.tools": ""}, allow_code=True))
    (prompt,) = trainer_prompts(trainer, 1)
    assert "tools" not in prompt.columns
    trainer.close()


def test_a_run_learns_from_episodes_evaluates_on_them_and_shows_them(multi, capsys):
    trainer, metrics = train(multi)
    lines = [json.loads(line) for line in (trainer.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["environment/turns"] for line in lines] == [3.0, 3.0]
    assert [line["environment/tool_calls"] for line in lines] == [32.0, 32.0]  # 16 episodes, evaluation apart
    assert all(line["mismatch/max_abs"] < 1e-4 for line in lines)
    assert metrics["eval/environment/turns"] == 3.0
    assert metrics["eval/accuracy"] == metrics["eval/short"]
    rollouts = read_rollouts(trainer.folder.rollout_file(2))
    for rollout in rollouts:
        assert [m["role"] for m in rollout.messages] == ["assistant", "tool"] * 2 + ["assistant"]
        assert rollout.reward == rollout.rewards["short"]  # the other only measures
        assert int(rollout.loss_mask.sum()) <= 3 + 4 + 5
    sampled = sum(int(r.loss_mask.sum()) for r in rollouts)
    assert lines[1]["tokens/generated"] == sampled
    assert main(["inspect", "rollouts", str(trainer.folder.path), "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r">>> .*<<< tool: .*>>> .*<<< tool: .*>>> .*tokens in 3 turns\]", shown, re.DOTALL)


ELSEWHERE = {
    "three at once": {"environment.max_concurrent": 3},
    "two processes": {
        "runtime.backend": "torchrun",
        "runtime.torchrun.processes": 2,
        "actor.backend": "data_parallel",
    },
}


@pytest.fixture
def alone(multi):
    """The run whose sampler takes one request at a time, where rounding does not depend on what is beside it."""
    multi |= {"rollout.hf": {"batch_size": 1}, "run.steps": 1, "eval.at_end": False}
    multi["plugins"].append(str(DATA_PARALLEL))
    return multi, train(multi)[0].folder


@pytest.mark.parametrize("case", ELSEWHERE)
def test_where_and_when_episodes_are_sampled_changes_none_of_them(alone, case):
    settings, first = alone
    again = train(settings, **{"run.name": "again"}, **ELSEWHERE[case])[0].folder
    pair = [read_rollouts(folder.rollout_file(1)) for folder in (first, again)]
    for a, b in zip(*pair, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert OFFERED["dialogues"](a) == OFFERED["dialogues"](b)
        assert a.rewards == b.rewards


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "remax"},
        {"advantage": "gae"},
        {"advantage": "gdpo"},
        {"advantage": "optimal_token_baseline_multi_turn"},
        {"advantage": "grpo", "kl_coef": 0.1, "kl_in": "reward"},
    ],
    ids=lambda table: table["advantage"],
)
def test_algorithms_run_on_episodes(multi, algorithm):
    _, metrics = train(multi, algorithm=algorithm, **{"run.steps": 1})
    assert metrics["environment/turns"] == 3.0
    assert metrics["actor/grad_norm"] > 0


def test_a_batch_has_the_turn_of_each_token(multi):
    trainer = Trainer(load_config(multi, allow_code=True))
    prompts = trainer_prompts(trainer, 2)
    rollouts = trainer.sampler.sample(trainer.sampler.requests(prompts, 1))
    trainer.score(rollouts, 1)
    batch = trainer.batch(rollouts)
    assert batch["turns"].tolist() == torch.cat([r.extras["turns"] for r in rollouts]).tolist()
    assert set(batch["turns"].tolist()) == {0, 1, 2, 3}
    trainer.close()


REFUSED = {
    "name": (
        {"environment.name": "ecko"},
        r"environment.name: Unknown environment 'ecko'. Did you mean 'echo'",
    ),
    "key": ({"environment.max_turn": 3}, r"environment.max_turn: unknown key. Did you mean 'max_turns'"),
    "option": (
        {"environment.echo": {"turn": 3}},
        r"environment.echo.turn: unknown key. Did you mean 'turns'",
    ),
    "score": (
        {"eval.score": "sort", "eval.at_end": False},
        r"eval.score: got 'sort', which is no reward of the run. Did you mean 'short'",
    ),
    "kind": ({"environment.name": "grpo"}, r"'grpo' is known as advantage estimator, not as environment"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_misspelt_is_refused_by_validate(multi, case):
    change, message = REFUSED[case]
    with pytest.raises(EngineError, match=message):
        Trainer(load_config(multi, change, allow_code=True))


def test_an_environment_that_sets_no_reward_needs_one(multi, tmp_path):
    (tmp_path / "echo.py").write_text(PLUGIN.replace(', rewards=frozenset({"short", "seen"})', ""))
    with pytest.raises(
        ConfigError, match=r"needs at least one \[\[reward\]\] with a name, or an \[environment\]"
    ):
        Trainer(load_config(multi, {"environment.reward_weights": {}}, allow_code=True))


def test_a_failing_environment_is_told_before_any_model_is_built(multi, tmp_path):
    (tmp_path / "echo.py").write_text(PLUGIN.replace("async def", "def").replace("await ", ""))
    trainer = Trainer(load_config(multi, allow_code=True))
    with pytest.raises(EngineError, match=r"echo.py'.*environment 'echo': echo must be an 'async def'"):
        trainer.train()
    assert trainer.groups == {}


def test_held_out_data_that_lack_its_column_are_refused_before_any_model_is_built(multi, tmp_path):
    needs = PLUGIN.replace("rewards=frozenset", 'needs=frozenset({"answer"}), rewards=frozenset', 1)
    (tmp_path / "echo.py").write_text(needs)
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "2+2=", "solution": "4"}\n')
    trainer = Trainer(
        load_config(multi, {"data.validation": str(tmp_path / "heldout.jsonl")}, allow_code=True)
    )
    with pytest.raises(
        EngineError, match=r"Environment 'echo' needs the column 'answer', which the data lacks"
    ):
        trainer.train()
    assert trainer.groups == {}
