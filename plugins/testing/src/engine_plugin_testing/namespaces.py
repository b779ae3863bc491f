"""Nodes that are network namespaces of one machine, joined by a virtual cable that can be cut.

A namespace has a loopback of its own, so whatever goes from one node to the other passes the cable. What they share:
the disk, the clock, the processes' numbers. Making them needs rights that a container may not give (``why_not``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    """The program of iproute2."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if shutil.which("ip") is None:
        return "no program 'ip' (iproute2) here"
    name = f"probe-{os.getpid()}"
    made = ip("netns", "add", name)
    linked = ip("-n", name, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    ip("netns", "del", name)
    if made.returncode or linked.returncode:
        return f"network namespaces are not allowed here: {(made.stderr or linked.stderr).strip()}"
    return ""


class Nodes:
    """Two nodes: ``names``, ``addresses``, and the name of the network interface of each, ``cables``."""

    addresses = ("10.213.87.1", "10.213.87.2")
    cables = ("veth0", "veth1")

    def __init__(self) -> None:
        self.names = [f"engine{number}-{os.getpid()}" for number in (0, 1)]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in self.names:
            _do("netns", "add", name)
            _do("-n", name, "link", "set", "lo", "up")
        near, far = self.cables
        ends = ["type", "veth", "peer", "name", far, "netns", self.names[1]]
        _do("-n", self.names[0], "link", "add", near, *ends)
        for name, end, address in zip(self.names, self.cables, self.addresses, strict=True):
            _do("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _do("-n", name, "link", "set", end, "up")

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str], cwd: Path, said: IO[Any]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node; what it says goes into a file."""
        words = ["ip", "netns", "exec", self.names[node], *command]
        return subprocess.Popen(words, env=dict(env), cwd=cwd, stdout=said, stderr=said)

    def run(
        self, node: int, command: Sequence[str], env: Mapping[str, str], cwd: Path, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end."""
        words = ["ip", "netns", "exec", self.names[node], *command]
        return subprocess.run(
            words, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
        )

    def cut(self) -> None:
        """Nothing passes the cable any more, and nobody is told."""
        _do("-n", self.names[0], "link", "set", self.cables[0], "down")

    def processes(self, node: int) -> list[int]:
        """Ids of what runs on a node."""
        return [int(pid) for pid in ip("netns", "pids", self.names[node]).stdout.split()]

    def received(self, node: int) -> int:
        """Bytes that came over the cable to a node."""
        counter = f"/sys/class/net/{self.cables[node]}/statistics/rx_bytes"
        return int(self.run(node, ["cat", counter], os.environ, Path("/"), 20).stdout)

    def close(self) -> None:
        """End both, with what runs there."""
        for number, name in enumerate(self.names):
            for pid in self.processes(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """For a test, which is skipped where there can be none."""
    import pytest

    if why := why_not():
        pytest.skip(why)
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()


def _do(*words: str) -> None:
    done = ip(*words)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
