"""Peers without the token at the control channel of a run that an external torchrun has started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.chaos.conftest import MARK, PATIENCE

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]

RANK = """
import os, sys, time

if os.environ["RANK"] == "1":  # comes late
    while not os.path.exists("come"):
        time.sleep(0.05)
from engine_core.cli.main import main

sys.exit(main(["train", "run.toml"]))
"""
TWO = {
    "runtime.backend": "torchrun",
    "actor.backend": "fsdp",
    "runtime.torchrun.processes": 2,
    "run.steps": 2,
}


@pytest.fixture
def torchrun(tmp_path):
    """``torchrun()``: starts the run of ``run.toml`` on two ranks; returns the process and the file of its output."""
    started = []

    def start():
        (tmp_path / "rank.py").write_text(RANK)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "rank.py",
        ]
        said = tmp_path / "said"
        with said.open("w") as file:
            environment = os.environ | {MARK: "torchrun"}
            started.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment, stdout=file, stderr=file, start_new_session=True
                )
            )
        return started[-1], said

    yield start
    for process in started:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def control_channel(process, said):
    """Return the port on which rank 0's process listens."""
    end = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, said.read_text()
        for rank in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                listening = [each for each in rank.net_connections() if each.status == "LISTEN"]
                if rank.environ().get("RANK") == "0" and listening:
                    return listening[0].laddr.port
        time.sleep(0.05)
    raise TimeoutError(said.read_text())


@pytest.fixture
def strangers():
    """``strangers(port)``: one who stays silent, and some who talk nonsense and connect again when they are rejected."""
    over, threads, rejected = threading.Event(), [], []

    def call(port, words):
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as stranger:
                stranger.sendall(words)
                stranger.settimeout(20)
                while stranger.recv(100):
                    pass
                rejected.append(words)
            time.sleep(0.05)

    def begin(port):
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 60, b"\xff" * 200):
            threads.append(threading.Thread(target=call, args=(port, words), daemon=True))
            threads[-1].start()
        return rejected

    yield begin
    over.set()
    for thread in threads:
        thread.join(30)


def test_peers_without_the_token_are_rejected_and_the_run_trains_with_its_ranks(
    tiny, torchrun, strangers, metrics, tmp_path
):
    tiny(TWO)
    process, said = torchrun()
    rejected = strangers(control_channel(process, said))
    end = time.monotonic() + PATIENCE
    while len(set(rejected)) < 3:
        assert time.monotonic() < end, rejected
        time.sleep(0.05)
    (tmp_path / "come").touch()
    assert process.wait(4 * PATIENCE) == 0, said.read_text()
    assert [line["step"] for line in metrics()] == [1, 2]


def test_a_rank_that_does_not_come_is_missed_in_time_however_often_others_connect(tiny, torchrun, strangers):
    tiny(TWO | {"runtime.torchrun.startup_timeout_minutes": 0.1})
    process, said = torchrun()
    strangers(control_channel(process, said))
    assert process.wait(2 * PATIENCE) == 1  # torchrun's own
    missing = "Rank 1 of 2 did not come within 0.1 minutes (runtime.torchrun.startup_timeout_minutes)"
    assert missing in said.read_text()
    assert "exitcode  : 5" in said.read_text()
