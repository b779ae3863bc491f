"""``engine bench`` over ranks."""

import json
import subprocess
import sys

import pytest

RUN = """
trainer = "sft"
[model]
path = "model"
[actor]
backend = "fsdp"
[runtime]
backend = "torchrun"
[runtime.torchrun]
processes = 2
[data]
train = "none.jsonl"
"""


def engine(words, folder):
    command = [sys.executable, "-m", "engine_core.cli.main", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("part", [["train", "--sequences", "4", "--warmup", "0"]])
def test_ranks_that_train_random_weights_of_a_shape_need_no_tokenizer(tmp_path, part):
    (tmp_path / "run.toml").write_text(RUN)
    words = ["bench", part[0], "run.toml", "--shape", "tiny", *part[1:], "--steps", "1", "--json"]
    assert engine(words, tmp_path)["processes"] == 2
