"""examples/calculator: the tool is exact and runs nothing, calls are made, and the policy learns to make them."""

import ast
import json
import operator
import os
import random
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "calculator" / "calculator.py"
LAST_LINE = r"held-out accuracy (\d\.\d\d) -> (\d\.\d\d)"
SMALL = {
    "OMP_NUM_THREADS": "1",
    "ENGINE__ROLLOUT__GROUP_SIZE": "4",
    "ENGINE__EVAL__MAX_PROMPTS": "8",
    "ENGINE__DATA__PROMPTS_PER_STEP": "32",
    "ENGINE__ACTOR__OPTIM__WARMUP_STEPS": "1",
}


@pytest.fixture(scope="module")
def calculate():
    return run_path(str(FILE))["calculate"]


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def worked_out(task: str) -> Fraction:
    """The same by Python's own parser."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        return Fraction(node.value)

    return value(ast.parse(task, mode="eval").body)


def random_task(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randint(1, 99))
    inner = f"{random_task(rng, depth - 1)}{rng.choice('+-*/ ')}{random_task(rng, depth - 1)}".replace(
        " ", " - "
    )
    return rng.choice(["{}", "({})", "-({})"]).format(inner)


def test_the_tool_calculates_as_pythons_parser_reads(calculate):
    rng = random.Random(0)
    seen = 0
    for _ in range(400):
        task = random_task(rng, 3)
        try:
            expected = worked_out(task)
        except ZeroDivisionError:
            continue
        if len(task) <= 60:
            seen += 1
            assert Fraction(calculate(task)) == expected, task
    assert seen > 100


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("", "expected a number, got 'the end'"),
        ("1+", "expected a number, got 'the end'"),
        ("(1", r"'\)' is missing"),
        ("1)", r"'\)' is too much"),
        ("1 2", "'2' is too much"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("2**9", r"expected a number, got '\*'"),
        ("__import__('os')", "expected a number, got '_'"),
        ("\N{SUPERSCRIPT TWO}", "expected a number"),
        ("9" * 61, "at most 60 characters"),
        ("(" * 60, "expected a number"),
    ],
)
def test_what_is_no_arithmetic_is_refused(calculate, task, message):
    with pytest.raises(ValueError, match=message):
        calculate(task)


def run(folder: Path, *arguments, **environment):
    examples = folder / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("__pycache__"))
    plain = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, str(examples / "calculator" / "run.py"), *map(str, arguments)],
        cwd=folder,
        env=plain | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(LAST_LINE, done.stdout.strip().splitlines()[-1])
    assert found, done.stdout[-2000:]
    return folder / "demo-calculator", float(found[1]), float(found[2])


def test_a_short_run_calls_the_tool_and_learns_from_what_the_policy_said_alone(tmp_path):
    from transformers import AutoTokenizer

    from engine_core.runs.rollout_files import read_rollouts

    folder, _, _ = run(tmp_path, "--sft-steps", 25, "--steps", 1, **SMALL)
    lines = map(json.loads, (folder / "runs" / "grpo" / "metrics.jsonl").read_text().splitlines())
    step = next(line for line in lines if line["step"] == 1)
    assert step["environment/tool_calls"] > 0
    assert 1 < step["environment/turns"] <= 3
    assert step["mismatch/max_abs"] < 1e-3
    tokenizer = AutoTokenizer.from_pretrained(folder / "sft")
    rollouts = read_rollouts(folder / "runs" / "grpo" / "rollouts" / "step_000001.parquet")
    assert len(rollouts) == 128
    for rollout in rollouts:
        tools = [m["content"] for m in rollout.messages if m["role"] == "tool"]
        turns = said(rollout, tokenizer)
        assert [turn.removesuffix("<|end|>") for turn in turns] == [
            m["content"] for m in rollout.messages if m["role"] == "assistant"
        ]
        after = rollout.token_ids[rollout.prompt_length :]
        unlearned = after[~rollout.loss_mask[rollout.prompt_length :]]
        assert tokenizer.decode(unlearned) == "".join(
            ("" if turn.endswith("<|end|>") else "<|end|>") + f"<|tool|>{text}<|end|><|assistant|>"
            for turn, text in zip(turns, tools, strict=False)
        )
        assert rollout.rewards["called"] == float(bool(tools))


def said(rollout, tokenizer):
    """The turns of the policy, decoded, by their numbers."""
    turns = rollout.extras["turns"]
    return [
        tokenizer.decode(rollout.token_ids[(turns == number) & rollout.loss_mask])
        for number in range(1, int(turns.max()) + 1)
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_policy_learns_to_use_its_tool(tmp_path):
    _, before, after = run(tmp_path, OMP_NUM_THREADS="1")  # another test has the other cores
    assert before <= 0.4
    assert after >= before + 0.25
