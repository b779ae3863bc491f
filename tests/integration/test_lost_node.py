"""A run on two nodes that only a cable joins: the roles work from both, and a node that is gone without a word is missed."""

import os
import sys
import time
from pathlib import Path

import pytest

from engine_plugin_processes.elastic_launch import LOOK_SECONDS
from engine_plugin_testing.namespaces import two_nodes

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
PORT = 29517
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


def start_on_both(nodes, folder, env=None):
    """A torchrun on each node; the processes, and the files with what they say. ``env`` is added."""
    started, said = [], [folder / "0.err", folder / "1.err"]
    for node in (0, 1):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        launcher += ["--nproc-per-node", "1", "--node-rank", str(node), "--rdzv-backend", "static"]
        launcher += ["--master-addr", nodes.addresses[0], "--master-port", str(PORT)]
        command = [*launcher, "-m", "engine_core.cli.main", "train", "run.toml"]
        whole = os.environ | {"GLOO_SOCKET_IFNAME": nodes.cables[node], "ENGINE_TOKEN": "of both nodes"}
        with said[node].open("w") as file:
            started.append(nodes.start(node, command, whole | (env or {}), folder, file))
    return started, said


def test_a_node_whose_cable_is_cut_is_missed_the_run_ends_with_its_cause_and_so_do_its_workers(folder):
    with two_nodes() as nodes:
        started, said = start_on_both(nodes, folder)
        until(lambda: said[0].read_text().count("  reward ") >= 3, said[0].read_text)  # weights came over it
        workers = [pid for pid in nodes.processes(1) if is_worker(pid)]
        assert len(workers) == 1
        nodes.cut()
        until(lambda: "Lost worker" in said[0].read_text(), said[0].read_text, MISSED_SECONDS)
        assert started[0].wait(SECONDS)
        until(lambda: not any(map(is_worker, workers)), said[1].read_text, MISSED_SECONDS)
        until(lambda: "engine: rank 1 ends" in said[1].read_text(), said[1].read_text, MISSED_SECONDS)
        text = said[0].read_text()
    assert "Lost worker rollout[1] on 10.213.87.2: its host does not answer" in text
    assert "The newest checkpoint is of step" in text
    assert f"the controller's node at {nodes.addresses[0]}:{PORT} is lost" in said[1].read_text()


def test_a_rank_that_waits_for_a_session_misses_the_controllers_node_in_time(folder):
    """The controller is busy before its first session (here it sleeps): no worker is there that could miss it."""
    with two_nodes() as nodes:
        _, said = start_on_both(nodes, folder, {"ENGINE_FAULT": "run.setup:sleep=600"})
        # of torchrun itself, and of its rank that waits
        until(lambda: connections(nodes) >= 2 and len(ranks(nodes)) == 1, said[1].read_text)
        until((folder / "runs" / "r").is_dir, said[0].read_text)
        time.sleep(LOOK_SECONDS + 2)  # one question is answered
        (waiting,) = ranks(nodes)
        nodes.cut()
        until(lambda: ended(waiting), said[1].read_text, MISSED_SECONDS)
        until(lambda: "engine: rank 1 ends" in said[1].read_text(), said[1].read_text)
        until(lambda: "exitcode: 6" in said[1].read_text(), said[1].read_text)
    assert f"the controller's node at {nodes.addresses[0]}:{PORT} is lost" in said[1].read_text()
    assert "Traceback" not in said[1].read_text().partition("engine: rank 1 ends")[0]


def connections(nodes):
    """How many connections of the second node to torchrun's store are open."""
    tables = nodes.run(1, ["cat", "/proc/net/tcp", "/proc/net/tcp6"], os.environ, Path("/"), 20).stdout
    fields = [line.split() for line in tables.splitlines()]
    return sum(far.endswith(f":{PORT:04X}") and state == "01" for _, _, far, state, *_ in fields)


def ranks(nodes):
    """Ids of the second node's ranks, without torchrun itself."""
    return [
        pid
        for pid in nodes.processes(1)
        if b"engine_core.cli.main" in (words := said_by(pid)) and b"distributed.run" not in words
    ]


def ended(pid):
    return not said_by(pid)


def said_by(pid):
    """The command line of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_worker(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return "engine_plugin_processes.worker" in file.read()
    except OSError:
        return False
