"""An external ``torchrun`` on two nodes, which are two launchers on loopback: the run of one machine."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.runs.rollout_files import read_rollouts

CONFORMANCE = Path(__file__).parents[1] / "conformance"
RUN = """
plugins = ["digits.py", "data_parallel_plugin.py"]
actor.backend = "data_parallel"
runtime.backend = "torchrun"
[[reward]]
name = "digits"
workers = 0
[tracking]
trackers = []
[run]
steps = 2
dir = "runs"
[rollout]
group_size = 4
max_response_tokens = 8
[checkpoint]
every_steps = 1
"""


@pytest.fixture
def folder(write_run, tmp_path):
    """A folder with a run file, as two nodes see it."""
    for name in ("data_parallel_plugin.py", "data_parallel_engine.py"):
        shutil.copy(CONFORMANCE / name, tmp_path)
    return write_run(RUN)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def command(node, nodes, port, *words):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--node-rank", node]
    torchrun += ["--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port]
    return [str(word) for word in (*torchrun, "-m", "engine_core.cli.main", *words)]


def start(folder, *words, env=({}, {})):
    """The same command on two nodes."""
    port = free_port()
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            command(node, 2, port, *words),
            cwd=folder,
            env=os.environ | env[node],
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for node in (0, 1)
    ]


def result_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = re.compile(r"(actor|reward|tokens|response_length)/.*")
    samples = [
        [(r.request_id, r.token_ids.tolist(), r.reward) for r in read_rollouts(file)]
        for file in sorted((run / "rollouts").glob("*.parquet"))
    ]
    return [{k: v for k, v in line.items() if kept.fullmatch(k)} for line in lines], samples


@pytest.mark.slow
def test_two_nodes_train_resume_and_export_as_one_machine(folder):
    token = {"ENGINE_TOKEN": "known to both nodes"}
    for words in (
        ("train", "run.toml", "--set", "run.name=nodes", "--steps", "1"),
        ("resume", "runs/nodes", "--steps", "2"),
        ("export", "runs/nodes", "exported"),
    ):
        nodes = start(folder, *words, env=(token, token))
        told = [node.communicate(timeout=280) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], told
    assert (folder / "exported" / "model.safetensors").exists()
    one = ["train", "run.toml", "--set", "run.name=one", "--set", "runtime.torchrun.processes=2"]
    done = subprocess.run(
        [sys.executable, "-m", "engine_core.cli.main", *one],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert result_of(folder / "runs" / "nodes") == result_of(folder / "runs" / "one")


@pytest.mark.slow
def test_a_node_with_another_token_gets_no_part_in_the_run(folder):
    words = (
        "train",
        "run.toml",
        "--set",
        "run.name=nodes",
        "--set",
        "runtime.torchrun.startup_timeout_minutes=0.4",
    )
    nodes = start(folder, *words, env=({"ENGINE_TOKEN": "mine"}, {"ENGINE_TOKEN": "another"}))
    told = [node.communicate(timeout=280) for node in nodes]
    assert all(node.returncode for node in nodes)
    assert "does not know the run's token" in told[1][1]
    assert (
        not list(folder.glob("runs/nodes/metrics.jsonl"))
        or not (folder / "runs/nodes/metrics.jsonl").read_text()
    )


@pytest.mark.slow
def test_a_port_that_is_taken_ends_torchrun_before_the_run_begins_and_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(0, 1, port, "train", "run.toml"),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode != 0
    assert f"port: {port}" in done.stderr
    assert "EADDRINUSE" in done.stderr
    assert not (folder / "runs").exists()
