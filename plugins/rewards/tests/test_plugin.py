"""The rewards as a run uses them: by name, in worker processes."""

import time

import pytest
import torch

from engine_core.config.rewards import RewardConfig
from engine_core.errors import EngineError, TrainingFailed
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_core.types import Prompt, Rollout

MINE = """
import functools

def score(completions, answer, bonus=0.0, **columns):
    assert columns["task"] == 1  # not the row's
    return [float(c == a) + bonus for c, a in zip(completions, answer)]

def chat(completions, **columns):
    return [float(len(completion[0]["content"])) for completion in completions]

class Judge:
    pass
"""


@pytest.fixture
def score(tmp_path):
    """Return ``score("numeric", {"tolerance": 1}, ["a", "b"], ["x", "y"])``: values of one reward, run in a worker."""
    runners = []

    def run(name, options, texts, answers, **settings):
        plugins = PluginSet.load({"rewards": [name]}, root=tmp_path)
        table = plugins.spec("rewards", name).config(**options)
        config = RewardConfig(
            name=name, options=table, **{"timeout_seconds": 5.0, "max_failure_share": 1.0} | settings
        )
        runners.append(RewardRunner([config], plugins))
        rollouts = [rollout(text, answer) for text, answer in zip(texts, answers, strict=True)]
        metrics = runners[-1].score(rollouts, 1)
        return [r.rewards[name] for r in rollouts], metrics

    yield run
    for runner in runners:
        runner.close()


def rollout(text, answer):
    tokens = torch.zeros(1 + len(text), dtype=torch.int64)
    return Rollout(
        request_id="1",
        prompt=Prompt("train:1", [0], "Q", {"answer": answer, "task": 0}),
        token_ids=tokens,
        loss_mask=tokens.bool(),
        rollout_log_probs=tokens.float(),
        policy_versions=tokens.int(),
        finish_reason="stop",
        text=text,
    )


@pytest.mark.parametrize(
    ("name", "options", "texts", "answers", "values"),
    [
        ("exact_match", {}, ["4", "5"], ["4", "4"], [1.0, 0.0]),
        ("numeric", {}, ["so 4", "so 5"], ["4", 4], [1.0, 0.0]),
        ("math", {}, [r"\boxed{0.5}", "2"], [r"\frac{1}{2}", "x"], [1.0, 0.0]),
        ("format", {"pattern": r"\d+"}, ["12", "1x"], [None, None], [1.0, 0.0]),
        (
            "length",
            {"max_tokens": 4, "buffer_tokens": 2},
            ["ab", "abc", "abcd"],
            [0, 0, 0],
            [0.0, -0.5, -1.0],
        ),
    ],
)
def test_every_reward_runs_in_a_worker(score, name, options, texts, answers, values):
    assert score(name, options, texts, answers)[0] == values


def test_a_power_tower_is_stopped(score):
    # sympy evaluates it in one call into C; math-verify's own timeout is off.
    began = time.monotonic()
    values, metrics = score("math", {}, ["$5^{5^{5^{5^{5}}}}$", "2"], ["2", "2"], timeout_seconds=2.0)
    assert values == [0.0, 1.0]  # no way around a bad reward
    assert metrics["reward/math/timeouts"] == 1
    assert time.monotonic() - began < 20


def test_a_pattern_that_backtracks_without_end_is_stopped(score):
    values, metrics = score(
        "format", {"pattern": "(a+)+"}, ["a" * 50 + "b", "aaa"], [0, 0], timeout_seconds=1.0
    )
    assert values == [0.0, 1.0]
    assert metrics["reward/format/timeouts"] == 1


def test_a_function_of_the_user_runs_with_its_arguments(score, tmp_path, caplog):
    (tmp_path / "mine.py").write_text(MINE)
    options = {"path": "mine.py", "allow_local_code": True, "arguments": {"bonus": 0.5, "task": 1}}
    with caplog.at_level("INFO"):
        values, _ = score("python", options, ["4", "5"], ["4", "4"])
    assert values == [1.5, 0.5]
    assert "mine.py: sha256 " in caplog.text


def test_a_function_written_for_trl_s_conversations_runs(score, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    options = {"path": "mine.py", "function": "chat", "allow_local_code": True, "conversational": True}
    assert score("python", options, ["abc", "d"], ["", ""])[0] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"path": "mine.py", "function": "scor"},
            r"'mine\.py' has no function 'scor'\. Did you mean 'score'\?",
        ),
        ({"path": "my.py"}, r"'my\.py' is absent: .* Did you mean 'mine\.py'\?"),
        ({"path": "../other.py"}, r"'\.\./other\.py' lies outside the run file's folder"),
    ],
)
def test_a_function_that_cannot_be_used_is_told_at_the_start(score, tmp_path, options, message):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path.parent / "other.py").write_text(MINE)
    with pytest.raises(EngineError, match=message):
        score("python", {"allow_local_code": True, **options}, [], [])


def test_data_without_numbers_ends_the_run_with_the_answer(score):
    with pytest.raises(TrainingFailed, match="the answer 'four' holds no number"):
        score("numeric", {}, ["4", "4"], ["four", "four"], max_failure_share=0.5)
