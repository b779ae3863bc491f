"""Collectives measured where a run would use them."""

import json
import subprocess
import sys

import pytest

from engine_plugin_testing import reference

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
@pytest.mark.parametrize("part", [["comm", "--mib", "0.01"], ["train", "--sequences", "4", "--warmup", "0"]])
def test_ranks_that_train_random_weights_of_a_shape_need_no_tokenizer(tmp_path, part):
    (tmp_path / "run.toml").write_text(RUN)
    words = ["bench", part[0], "run.toml", "--shape", "tiny", *part[1:], "--steps", "1", "--json"]
    assert engine(words, tmp_path)["processes"] == 2


@pytest.mark.slow
def test_two_ranks_measure_every_collective_of_their_mesh(tmp_path):
    reference.write_model(tmp_path / "model", {}, 0, True)
    (tmp_path / "run.toml").write_text(RUN)
    words = ["bench", "comm", "run.toml", "--mib", "0.01", "--mib", "1", "--steps", "3", "--json"]
    found = engine(words, tmp_path)
    assert (found["part"], found["processes"]) == ("comm", 2)
    names = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    assert {(one["axis"], one["collective"]) for one in found["measured"]} == {
        ("shard", name) for name in names
    }
    assert {one["backend"] for one in found["measured"]} == {"gloo"}
    assert sorted({one["bytes"] for one in found["measured"]}) == [10488, 2**20]
    for one in found["measured"]:
        assert one["algorithm_gb_per_s"] == one["bytes"] / one["seconds"] / 1e9
        factor = {"all_reduce": 1.0, "broadcast": 1.0}.get(one["collective"], 0.5)  # of two ranks
        assert one["bus_gb_per_s"] == factor * one["algorithm_gb_per_s"]
