"""Nodes that are network namespaces of one machine, connected by a virtual cable that can be cut.

Each namespace has its own loopback interface, so all traffic between nodes passes the cable. The nodes share the disk,
the clock and process ids. Making namespaces needs rights that a container may lack (``why_not``).
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
    """Run the program ``ip`` of iproute2."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def why_not() -> str:
    """Return why this machine cannot make network namespaces; empty if it can."""
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
    """A pair of nodes: ``names``, ``addresses``, and ``cables``, the names of their network interfaces."""

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
        """Start a command on a node; its output goes to the file ``said``."""
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
        """Cut the cable; neither end is notified."""
        _do("-n", self.names[0], "link", "set", self.cables[0], "down")

    def processes(self, node: int) -> list[int]:
        """Return the ids of the processes on a node."""
        return [int(pid) for pid in ip("netns", "pids", self.names[node]).stdout.split()]

    def received(self, node: int) -> int:
        """Return the number of bytes that a node has received over the cable."""
        counter = f"/sys/class/net/{self.cables[node]}/statistics/rx_bytes"
        return int(self.run(node, ["cat", counter], os.environ, Path("/"), 20).stdout)

    def close(self) -> None:
        """End both nodes and their processes."""
        for number, name in enumerate(self.names):
            for pid in self.processes(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", name)


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Yield two nodes to a test; skip it where namespaces cannot be made."""
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
