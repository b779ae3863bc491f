"""Rows 11 to 16: whatever a reward does, the run survives it, counts it and says it, or ends as it was told to."""

import pytest

from engine_core.runs.rollout_files import read_rollouts

pytestmark = pytest.mark.chaos

MISBEHAVING = '''
import ctypes
import os
import sys
import time
from engine_core import hookimpl
from engine_core.specs import Reward

ACTION = """{action}"""


def hurt():
    {action}


def misbehave(completion, answer, tags=()):
    """Hurts on one sample of each step: the data say which."""
    if answer == "8" and not os.path.exists("once"):
        open("once", "w").close()
        return hurt()
    return float(sum(map(ord, completion)) % 7)


def in_lists(completions, answer):
    if "8" in answer and not os.path.exists("once"):
        open("once", "w").close()
        return hurt()
    return [float(sum(map(ord, c)) % 7) for c in completions]


@hookimpl
def engine_rewards():
    return {{"misbehave": Reward(load=misbehave), "in_lists": Reward(load=in_lists)}}
'''


def table(name="misbehave", **settings):
    settings = {"workers": 1, "timeout_seconds": 1.0} | settings
    lines = [
        f"{key} = {value!r}".replace("True", "true").replace("'", '"') for key, value in settings.items()
    ]
    return "\n".join(["[[reward]]", f'name = "{name}"', *lines]) + "\n"


STEPS = {"run.steps": 6, "data.shuffle": False, "data.prompts_per_step": 4}  # answer "8" is row 4, in step 2


@pytest.fixture
def train(engine, tiny):
    """``train(action, **reward settings)``: a run whose reward does something bad once, in step 2."""

    def run(action, name="misbehave", changes=None, **settings):
        path = tiny(
            STEPS | (changes or {}), reward=table(name, **settings), plugin=MISBEHAVING.format(action=action)
        )
        return engine("train", path)

    return run


WORKER_DIES = {  # what the function does, how the log tells it
    "sleeps": ("time.sleep(60)", "no answer after 1 s"),
    "computes without end": ("while True: pass", "no answer after 1 s"),
    "holds the interpreter in C": ("return 5**5**5**5", "no answer after 1 s"),
    "hangs in a regular expression": (
        "import re; return re.match('(a|aa)+$', 'a' * 60 + 'b')",
        "no answer after 1 s",
    ),
    "sys.exit": ("sys.exit(3)", "its worker exited with status 3"),
    "sys.exit without a number": ("sys.exit('enough')", "its worker exited with status 1"),
    "sys.exit with success": ("sys.exit()", "its worker exited with status 0"),
    "os._exit": ("os._exit(4)", "its worker exited with status 4"),
    "segfault": ("ctypes.string_at(0)", "its worker was killed by SIGSEGV"),
    "kills itself": ("os.kill(os.getpid(), 9)", "its worker was killed by SIGKILL"),
}


QUICK_DEATHS = {"sleeps", "holds the interpreter in C", "sys.exit", "segfault"}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=[] if w in QUICK_DEATHS else pytest.mark.slow) for w in WORKER_DIES]
)
def test_a_worker_that_hangs_or_dies_costs_one_sample_and_is_replaced(train, metrics, what):
    action, told = WORKER_DIES[what]
    run = train(action)
    assert run.code == 0, run.err
    assert f"Reward 'misbehave' failed on sample train:4 (2:0:0) in step 2: {told}" in run.err
    hurt = metrics()[1]
    kind = "timeouts" if "no answer" in told else "errors"
    assert hurt[f"reward/misbehave/{kind}"] == hurt["reward/failures"] == 1
    assert hurt["reward/timeouts"] == (kind == "timeouts")
    assert hurt["reward/misbehave/restarts"] == 1
    assert all(line["reward/failures"] == line["reward/misbehave/restarts"] == 0 for line in metrics()[2:])


SAMPLE_FAILS = {
    "raises": ("raise ValueError('this one')", "ValueError: this one"),
    "allocates without end": ("bytearray(10**13)", "MemoryError"),
    "NaN": ("return float('nan')", "must give a finite number for each sample, got nan"),
    "infinity": ("return float('-inf')", "must give a finite number for each sample, got -inf"),
    "text": ("return '1.0'", "must give a number or None for each sample, got '1.0' (str)"),
    "a list": ("return [1.0]", "must give a number or None for each sample, got [1.0] (list)"),
    "reads stdin": ("return float(input())", "EOFError"),
}


QUICK_FAILURES = {("raises", 0), ("raises", 1), ("NaN", 0), ("text", 1), ("reads stdin", 1)}


@pytest.mark.parametrize(
    ("what", "workers"),
    [
        pytest.param(what, workers, marks=[] if (what, workers) in QUICK_FAILURES else pytest.mark.slow)
        for what in SAMPLE_FAILS
        for workers in (0, 1)
    ],
)
def test_a_sample_that_fails_is_told_with_its_id_and_left_out(engine, train, metrics, what, workers):
    action, told = SAMPLE_FAILS[what]
    run = train(action, workers=workers)
    assert run.code == 0, run.err
    assert "failed on sample train:4 (2:0:0) in step 2" in run.err
    assert told in run.err
    assert run.err.count("Traceback") <= 1
    assert metrics()[1]["reward/failures"] == 1
    rollouts = read_rollouts(engine.folder / "runs/r/rollouts/step_000002.parquet")
    assert [r.request_id for r in rollouts if not r.valid] == ["2:0:0"]
    assert rollouts[0].rewards == {"misbehave": None}


NO_REWARDS = {  # for a function in plural form
    "too few": (
        "return [1.0]",
        "must return a list of 8 numbers, one for each sample, got a list of length 1",
    ),
    "a number": ("return 1.0", "must return a list of 8 numbers, one for each sample, got 1.0 (float)"),
    "nothing": ("return None", "must return a list of 8 numbers, one for each sample, got None (NoneType)"),
    "text": (
        "return 'abcdefgh'",
        "must return a list of 8 numbers, one for each sample, got 'abcdefgh' (str)",
    ),
    "a matrix": (
        "import numpy; return numpy.ones((8, 1))",
        "must return a list of 8 numbers, one for each sample, got ndarray of shape (8, 1)",
    ),
}


@pytest.mark.parametrize("what", NO_REWARDS)
def test_a_result_of_the_wrong_shape_is_never_stretched_to_fit(train, metrics, what):
    action, told = NO_REWARDS[what]
    run = train(action, "in_lists", workers=0, max_failure_share=1.0)
    assert run.code == 0, run.err
    assert f"Reward 'in_lists' {told}" in run.err
    assert metrics()[1]["reward/failures"] == 8
    assert metrics()[1]["actor/empty_updates"] == 1  # nobody is left to learn from
    assert metrics()[2]["reward/failures"] == 0


def test_an_array_of_the_right_length_is_a_result(train, metrics):
    action = "import torch; return torch.arange(len(completions)) % 2 == 0"
    run = train(action.replace("len(completions)", "8"), "in_lists", workers=0)
    assert run.code == 0, run.err
    assert metrics()[1]["reward/failures"] == 0
    assert metrics()[1]["reward/mean"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("action", "key"), [("raise ValueError('no')", "on_error"), ("time.sleep(60)", "on_timeout")]
)
def test_the_policies_of_a_failure(train, metrics, engine, action, key):
    run = train(action, **{key: "fail"}, changes={"checkpoint.every_steps": 1})
    assert run.code == 6, run.err
    assert f'The run ends because {key} = "fail". The weights were left alone.' in run.err
    assert ".." not in run.err.splitlines()[-1]
    assert [line["step"] for line in metrics()] == [1]
    (engine.folder / "once").unlink()
    zero = train(action, **{key: "zero"}, changes={"run.name": "zero"})
    assert zero.code == 0
    rollouts = read_rollouts(engine.folder / "runs/zero/rollouts/step_000002.parquet")
    assert (rollouts[0].rewards, rollouts[0].valid) == ({"misbehave": 0.0}, True)


def test_too_many_failures_in_a_step_end_the_run(engine, tiny, metrics):
    always = (
        MISBEHAVING.format(action="raise OSError('judge down')")
        .replace('"8"', "answer")
        .replace("once", "no")
    )
    always = always.replace('open("no", "w").close()', "pass")
    run = engine("train", tiny(STEPS, reward=table(max_failure_share=0.25), plugin=always))
    assert run.code == 6
    assert "more than max_failure_share = 0.25 allows. First: sample train:0" in run.err
    assert run.err.count("Traceback") == 1  # the same one is told once
    assert metrics() == []


def test_what_a_reward_does_to_its_arguments_and_streams_stays_with_it(engine, train, metrics):
    action = "print('noise ' * 5000); os.close(0); os.fork() or os._exit(0); return 1.0"
    run = train(action)
    assert run.code == 0, run.err
    assert "noise" not in run.out
    assert all(line["reward/failures"] == 0 for line in metrics())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_changes_its_arguments_changes_nothing_else(engine, tiny, metrics, workers):
    plugin = """
from engine_core import hookimpl
from engine_core.specs import Reward


def greedy(completions, prompts, completion_ids, answer):
    given = [len(ids) for ids in completion_ids]
    for ids in completion_ids:
        ids.clear()
    answer[:] = ["changed"] * len(answer)
    completions.clear()
    return [float(n) for n in given]


@hookimpl
def engine_rewards():
    return {"greedy": Reward(load=greedy)}
"""
    run = engine("train", tiny(STEPS, reward=table("greedy", workers=workers), plugin=plugin))
    assert run.code == 0, run.err
    rollouts = read_rollouts(engine.folder / "runs/r/rollouts/step_000006.parquet")
    assert [r.prompt.columns["answer"] for r in rollouts[::2]] == ["40", "42", "44", "46"]
    assert all(r.rewards["greedy"] == r.response_length for r in rollouts)


def test_a_worker_that_takes_too_much_memory_fails_its_sample_alone(train, metrics):
    run = train("return float(len(bytearray(3 * 10**9)))", max_memory_gb=2.0)
    assert run.code == 0, run.err
    assert "MemoryError" in run.err
    assert metrics()[1]["reward/failures"] == 1


def test_a_column_that_the_data_lack_is_told_before_a_model_is_built(engine, tiny):
    plugin = MISBEHAVING.format(action="pass").replace("answer", "anwser")
    for command in (["train", "run.toml", "--dry-run"], ["train", "run.toml"]):
        tiny(STEPS, reward=table(), plugin=plugin)
        run = engine(*command)
        assert run.code == 4, run.err
        assert (
            "Reward 'misbehave' needs 'anwser', which is no column of the data. Did you mean 'answer'?"
            in run.err
        )
        assert "random weights" not in run.err
