"""examples/from_scratch: its stages run one after another, and the exported folder answers in transformers."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_scratch"
SMALL = {
    "OMP_NUM_THREADS": "1",
    "ENGINE__ACTOR__MAX_TOKENS_PER_RANK": "4096",
    "ENGINE__ACTOR__OPTIM__WARMUP_STEPS": "1",
    "ENGINE__DATA__PROMPTS_PER_STEP": "8",
    "ENGINE__DATA__NUM_WORKERS": "0",
    "ENGINE__RUN__STEPS": "2",
}
GRPO = {
    "ENGINE__ROLLOUT__BACKEND": "hf",
    "ENGINE__ROLLOUT__MAX_RESPONSE_TOKENS": "24",
    "ENGINE__EVAL__MAX_PROMPTS": "8",
}


@pytest.fixture(scope="module")
def problem():
    return run_path(str(EXAMPLE / "problems.py"))["problem"]


def test_each_step_of_a_solution_is_right_and_ends_in_the_answer(problem):
    draw = random.Random(3)
    for _ in range(2000):
        row = problem(draw)
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", row["response"])
        for a, sign, b, result in steps:
            left, right = int(a), int(b)
            worked_out = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}
            assert worked_out[sign] == int(result)
        assert steps[-1][-1] == row["answer"]
        assert int(row["answer"]) > 0
        assert row["response"].endswith(f"The answer is \\boxed{{{row['answer']}}}.")


@pytest.mark.slow
def test_the_stages_run_one_after_another_and_the_export_answers(tmp_path):
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    engine = str(Path(sys.executable).with_name("engine"))

    def ran(*command, **settings):
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | SMALL | settings, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ran(sys.executable, "prepare.py", "out", "--small")
    files = {
        name: (tmp_path / f"out/data/{name}.jsonl").read_text().splitlines()
        for name in ("worked", "train", "heldout")
    }
    questions = [json.loads(line)["prompt"] for lines in files.values() for line in lines]
    assert len(questions) == len(set(questions)) == 3100  # no problem is in two files
    pages = (tmp_path / "out/data/pages.jsonl").read_text()
    assert [question for question in questions if question in pages] == []
    for stage, out, settings in (("pretrain", "pretrained", {}), ("sft", "sft", {}), ("grpo", "final", GRPO)):
        ran(engine, "train", f"{stage}.toml", **settings)
        ran(engine, "export", f"out/runs/{stage}", f"out/{out}", **settings)
    answers = run_path(str(tmp_path / "ask.py"))["with_transformers"](
        str(tmp_path / "out/final"), questions[:2]
    )
    assert len(answers) == 2
    assert all(answers)
