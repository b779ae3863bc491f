"""A run on two nodes that only a cable joins: the roles work from both, and a node that is gone without a word is missed."""

import os
import sys
import time

import pytest

from engine_core.testing.namespaces import two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

RUN = """
plugins = ["digits.py"]
trainer = "async"
[runtime]
backend = "torchrun"
[placement]
pools = { train = 1, serve = 1 }
actor = "train"
rollout = "serve"
[[reward]]
name = "digits"
workers = 0
[tracking]
trackers = []
[run]
steps = 5000
name = "r"
[rollout]
group_size = 4
max_response_tokens = 8
[checkpoint]
every_steps = 1
"""
SECONDS = 240.0
MISSED_SECONDS = 60.0  # it takes 15 to 25; the system alone would take a quarter of an hour


@pytest.fixture
def folder(write_run):
    return write_run(RUN)


def until(found, why, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, why()
        time.sleep(0.1)


def test_a_node_whose_cable_is_cut_is_missed_the_run_ends_with_its_cause_and_so_do_its_workers(folder):
    with two_nodes() as nodes:
        started, said = [], [folder / "0.err", folder / "1.err"]
        for node in (0, 1):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            launcher += ["--nproc-per-node", "1", "--node-rank", str(node), "--rdzv-backend", "static"]
            launcher += ["--master-addr", nodes.addresses[0], "--master-port", "29517"]
            command = [*launcher, "-m", "engine_core.cli.main", "train", "run.toml"]
            env = os.environ | {"GLOO_SOCKET_IFNAME": nodes.cables[node], "ENGINE_TOKEN": "of both nodes"}
            with said[node].open("w") as file:
                started.append(nodes.start(node, command, env, folder, file))
        until(lambda: said[0].read_text().count("  reward ") >= 3, said[0].read_text)  # weights came over it
        workers = [pid for pid in nodes.processes(1) if is_worker(pid)]
        assert len(workers) == 1
        nodes.cut()
        until(lambda: "Lost worker" in said[0].read_text(), said[0].read_text, MISSED_SECONDS)
        assert started[0].wait(SECONDS)
        until(lambda: not any(map(is_worker, workers)), said[1].read_text, MISSED_SECONDS)
        until(lambda: "engine: rank 1 ends" in said[1].read_text(), said[1].read_text, MISSED_SECONDS)
        text = said[0].read_text()
    assert "Lost worker rollout[1] on 10.213.87.2: its host has acknowledged nothing for 15 s" in text
    assert "The newest checkpoint is of step" in text
    assert f"the controller's node at {nodes.addresses[0]}:29517 is lost" in said[1].read_text()


def is_worker(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return "engine_core.runtime.worker" in file.read()
    except OSError:
        return False
