"""examples/expressions: data is right, a short run is judged by tests in a sandbox, and the policy learns from them."""

import ast
import json
import operator
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]
LAST_LINE = r"held-out accuracy (\d\.\d\d) -> (\d\.\d\d)"
SMALL = {
    "OMP_NUM_THREADS": "1",
    "ENGINE__ROLLOUT__GROUP_SIZE": "4",
    "ENGINE__EVAL__MAX_PROMPTS": "4",
    "ENGINE__DATA__PROMPTS_PER_STEP": "8",
    "ENGINE__ACTOR__OPTIM__WARMUP_STEPS": "1",
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def worked_out(code, names):
    """The same by Python's own parser."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return names[node.id] if isinstance(node, ast.Name) else node.value

    return value(ast.parse(code, mode="eval").body)


@pytest.fixture(scope="module")
def tasks():
    return run_path(str(ROOT / "examples" / "expressions" / "tasks.py"))


def test_tests_hold_what_expressions_give(tasks):
    rng = random.Random(0)
    for words, code in tasks["tasks"]():
        tests = tasks["tests"](code, rng)
        assert tests["outputs"] == [worked_out(code, {"a": a, "b": b}) for a, b in tests["inputs"]], words


def test_a_slip_changes_one_character(tasks):
    rng = random.Random(0)
    for _, code in tasks["tasks"]():
        slipped = tasks["slipped"](code, rng)
        assert len(slipped) == len(code)
        assert sum(a != b for a, b in zip(slipped, code, strict=True)) == 1


def run(folder: Path, *arguments, **environment):
    examples = folder / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("__pycache__"))
    plain = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, str(examples / "expressions" / "run.py"), *map(str, arguments)],
        cwd=folder,
        env=plain | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(LAST_LINE, done.stdout.strip().splitlines()[-1])
    assert found, done.stdout[-2000:]
    return folder / "demo-expressions", float(found[1]), float(found[2])


@pytest.mark.slow
def test_a_short_run_is_judged_by_tests(tmp_path):
    from engine_core.runs.rollout_files import read_rollouts

    folder, _, _ = run(tmp_path, "--sft-steps", 4, "--steps", 1, **SMALL)
    metrics = [
        json.loads(line) for line in (folder / "runs" / "grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    step = next(line for line in metrics if line["step"] == 1)
    assert (step["reward/failures"], step["reward/code/restarts"]) == (0, 0)
    rollouts = read_rollouts(folder / "runs" / "grpo" / "rollouts" / "step_000001.parquet")
    assert len(rollouts) == 32
    for rollout in rollouts:
        assert (rollout.answers["code"] == "3 passed") == (rollout.reward == 1.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_policy_learns_from_tests_which_expressions_are_right(tmp_path):
    _, before, after = run(tmp_path, "--steps", 20, OMP_NUM_THREADS="1")  # half of its steps are enough
    assert before <= 0.6
    assert after >= before + 0.25
