"""The benchmark beside TRL: its arithmetic, its gates, and two steps of the engine's side.

TRL's side runs in an environment of its own, which ``benchmarks/trl/compare.py`` makes.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "trl"


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("trl_figures", FOLDER / "figures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["trl_figures"] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["trl_figures"]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.1, 1.4), (0.5, 3.0), (0.9, 7.4), (1.0, 9.0)])
def test_percentiles_are_between_neighbours(figures, share, expected):
    assert figures.percentile([3.0, 1.0, 9.0, 5.0, 2.0], share) == pytest.approx(expected)


def test_a_ratio_is_of_medians_and_its_interval_holds_it(figures):
    slow, fast = [[4.0, 4.2, 4.1], [4.3, 3.9, 4.1]], [[2.0, 2.1, 2.2], [1.9, 2.0, 2.0]]
    ratio, low, high = figures.ratio_interval(slow, fast)
    assert ratio == pytest.approx(4.1 / 2.0)
    assert 3.9 / 2.2 <= low < ratio < high <= 4.3 / 1.9
    assert figures.ratio_interval(slow, fast) == (ratio, low, high)  # the same draw each time


def test_steps_that_do_not_vary_have_an_interval_of_a_point(figures):
    assert figures.ratio_interval([[3.0] * 4], [[2.0] * 4]) == (1.5, 1.5, 1.5)


def found_of(**changes):
    case = {"loss": 0.25, "grad_norm": 2.0}
    found = {"rewards": [0.5, 1.0], "advantages": [-1.0, 1.0], "log_probs": [[-1.0], [-2.0]]}
    return found | {"on_policy": case, "off_policy": case} | changes


@pytest.mark.parametrize(
    "other",
    [
        {"rewards": [0.5, 1.1]},
        {"advantages": [-1.0, 1.00002]},
        {"log_probs": [[-1.0], [-2.00002]]},
        {"on_policy": {"loss": 0.25002, "grad_norm": 2.0}},
        {"off_policy": {"loss": 0.25, "grad_norm": 2.00003}},
    ],
)
def test_other_maths_fails_its_gate(figures, other):
    assert figures.same_maths(found_of(), found_of(), "fp32").passed
    assert not figures.same_maths(found_of(), found_of(**other), "fp32").passed


@pytest.mark.parametrize(
    ("step", "passes"),
    [
        ({"gap": 1e-6, "ratio": 1.0, "kl": 0.0}, True),
        ({"gap": 1e-2, "ratio": 1.0, "kl": 0.0}, False),
        ({"gap": 1e-6, "ratio": 1.0 + 1e-7, "kl": 0.0}, False),
        ({"gap": 1e-6, "ratio": 1.0, "kl": 1e-9}, False),
    ],
)
def test_the_first_ratio_must_be_exactly_1(figures, step, passes):
    assert figures.same_policy([step, {"gap": 1e-6, "ratio": 1.1, "kl": 0.1}], "fp32").passed is passes


@pytest.mark.parametrize(
    ("sampler", "trainer", "passes"),
    [
        (["a", "b", "c"], ["a", "b", "c"], True),
        (["a", "a", "b"], ["a", "b", "c"], False),  # a step behind
        (["a", "a", "a"], ["a", "a", "a"], False),  # nothing was learned
        (["a"], ["a"], False),  # one step shows nothing
    ],
)
def test_weights_must_move_and_arrive(figures, sampler, trainer, passes):
    assert figures.moved_weights("x", sampler, trainer).passed is passes


def test_both_must_learn_and_alike(figures):
    rising = [[0.5, 0.6, 0.7, 0.8], [0.5, 0.6, 0.7, 0.9]]
    assert figures.learns(rising, [[0.5, 0.6, 0.7, 0.85]]).passed
    assert not figures.learns(rising, [[0.5, 0.5, 0.5, 0.5]]).passed  # does not rise
    assert not figures.learns(rising, [[0.5, 0.6, 0.6, 0.7]]).passed  # rises elsewhere


def test_tokens_may_differ_by_two_percent(figures):
    def steps(n):
        return [{"completion_tokens": float(n)}]

    assert figures.same_tokens(steps(8192), steps(8100)).passed
    assert not figures.same_tokens(steps(8192), steps(8000)).passed


def test_inputs_must_be_one(figures):
    one, other = ({"inputs": {"model_sha256": name, "data_sha256": "d"}} for name in "ab")
    assert figures.same_inputs([one, one]).passed
    assert not figures.same_inputs([one, other]).passed


def test_the_engines_side_runs_two_steps_of_full_responses(tmp_path):
    out = tmp_path / "engine.json"
    words = [sys.executable, str(FOLDER / "engine_run.py"), "time", "--workload", "tiny", "--steps", "2"]
    words += ["--cache", str(tmp_path / "workloads"), "--out", str(out)]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [step["completion_tokens"] for step in found["steps"]] == [64.0, 64.0]  # 2 x 4 responses of 8
    assert [step["train_tokens"] for step in found["steps"]] == [112.0, 112.0]
    assert found["steps"][0]["ratio"] == 1.0
    assert all(step["wall"] > 0 and step["cpu"] > 0 for step in found["steps"])
    assert found["first_step_seconds"] > found["steps"][0]["wall"]
