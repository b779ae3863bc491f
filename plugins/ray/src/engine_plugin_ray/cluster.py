"""The cluster of a run: a private one on this machine, or an existing one that the run joins.

A private cluster listens on the loopback interface alone, requires a token made for this process, has no dashboard,
sends no usage statistics, and keeps its files in a private folder. Its processes end with the controller, however that
ends: Ray ties them to the process that started them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_core.temporary_folder import NAME, TemporaryFolder
from engine_plugin_ray.address import AUTO, host_and_port

log = logging.getLogger("engine")

CONNECT_SECONDS = 5.0
STORE_BYTES = 128 << 20  # of a private cluster's object store: messages and weights do not use it
LOOPBACK = ("127.0.0.1", "::1")
OWN = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a private cluster; the last variable puts its nodes at the loopback address."""
LEAN = {
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""Defaults for the environment of a private cluster. Ray's niceness of 15 would give every other process of the machine
priority over the workers; metrics and task events of a private cluster have no reader."""
PREFIX = "ray-"
SOCKET_BYTES = 107  # longest name of a socket
SOCKET = f"/{NAME}{PREFIX}12345678/ray/session_2026-01-02_03-04-05_123456_1234567/sockets/plasma_store"
"""Longest socket path that Ray makes below the temporary folder."""
_TOKEN = secrets.token_hex(32)  # one a process: Ray reads it once


class Cluster:
    """A connection to Ray. ``close`` ends what this object has started."""

    def __init__(self, address: str) -> None:
        self.address = address  # as in the run file
        self._folder: TemporaryFolder | None = None
        self._connected = False  # by this object

    @property
    def folder(self) -> str | None:
        """The folder of a private cluster, which only this user may enter."""
        return None if self._folder is None else self._folder.path

    @property
    def own(self) -> bool:
        """Whether the cluster is private and ends with this object."""
        return self.folder is not None

    @property
    def shown(self) -> str:
        """The cluster's name for messages."""
        return f"the cluster at '{self.address}'" if self.address else "the cluster of this machine"

    def start(self, cpus: float, gpus: int) -> None:
        """Start a private cluster.

        Args:
            cpus: number of CPUs of the cluster.
            gpus: number of this machine's GPUs that it may use.

        Raises:
            EnvironmentProblem: Ray does not start here, or would be open to others.
        """
        import ray

        self._folder = TemporaryFolder(PREFIX, _short_folder())
        lean = {name: os.environ.get(name, value) for name, value in LEAN.items()}
        env = {**lean, **OWN, "RAY_AUTH_TOKEN": _TOKEN}
        with _environment(env), _loopback(), _own_signals():
            _read_settings_again()
            try:
                ray.init(
                    "local", num_cpus=math.ceil(cpus), num_gpus=gpus, object_store_memory=STORE_BYTES, include_dashboard=False,
                    _temp_dir=f"{self.folder}/ray", **_quiet(),
                )  # fmt: skip
            except Exception as error:
                self.close()
                raise EnvironmentProblem(
                    f"Ray did not start on this machine: {_first_line(error)}."
                ) from error
        self._connected = True
        at = ray.util.get_node_ip_address()
        if at not in LOOPBACK or not asks_for_token():
            self.close()
            raise EnvironmentProblem(
                f"Ray listens on {at} {'with' if asks_for_token() else 'without'} a token; expected the loopback address "
                "and a token. Start a cluster with 'ray start' and name it in runtime.ray.address."
            )
        log.info("Ray %s: a cluster of the run's own at %s, which asks for a token.", ray.__version__, at)

    def join(self) -> None:
        """Join the cluster at ``address``.

        Raises:
            ConfigError: nothing answers there, or Ray cannot join, for example because the cluster requires another token,
                has another version, or does not contain this machine.
        """
        import ray

        if ray.is_initialized():  # by the program that contains this run
            log.info("Ray: this process belongs to a cluster already, which is used.")
            return
        self._reach()
        with _own_signals():
            try:
                ray.init(self.address, **_quiet())
            except Exception as error:
                with contextlib.suppress(Exception):
                    ray.shutdown()
                raise ConfigError(
                    f"runtime.ray.address = '{self.address}': the cluster cannot be joined: {_first_line(error)}. Run engine on "
                    "a node of the cluster (ray start --address=HOST:6379), with its versions of Ray and Python. If the "
                    "cluster asks for a token, set RAY_AUTH_MODE to 'token' and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to "
                    "the cluster's."
                ) from error
        self._connected = True
        log.info("Ray %s: joined the cluster at %s.", ray.__version__, self.address)

    def _reach(self) -> None:
        """Raise ``ConfigError`` for an address at which nothing answers: Ray itself would wait for minutes."""
        if self.address == AUTO:
            return
        try:
            socket.create_connection(host_and_port(self.address), CONNECT_SECONDS).close()
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"runtime.ray.address = '{self.address}': nothing answers there ({error}). Start the cluster (ray start "
                "--head), check the address, or leave it out for a private cluster of the run."
            ) from None

    def close(self) -> None:
        """Leave the cluster; a private one ends, and its folder is removed."""
        if self._connected:
            import ray

            with _own_signals():
                ray.shutdown()
            self._connected = False
        if self._folder is not None:
            self._folder.remove()
        self._folder = None

    @property
    def logs(self) -> Path | None:
        """The folder of the logs of this node's processes."""
        import ray

        node: Any = ray._private.worker._global_node
        return None if node is None else Path(node.get_logs_dir_path())


def _quiet() -> dict[str, Any]:
    """Return arguments of ``ray.init`` without the workers' output, which comes by this project's own channel."""
    return {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": f"engine-{secrets.token_hex(8)}",
    }


def asks_for_token() -> bool:
    """Return whether the cluster that this process belongs to requires a token."""
    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)


def _read_settings_again() -> None:
    """Make Ray read its environment again: it reads settings when it is imported, and a token once."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _loopback() -> Iterator[None]:
    """Change Ray's constant within the block: Ray read it when it was imported, perhaps before ``OWN`` was set."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers after the block: Ray replaces that of SIGTERM, which saves a run here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _short_folder() -> str | None:
    """Return the parent of a private cluster's folder: None (the temporary folder), or ``/tmp`` for shorter socket names."""
    return None if len(os.fsencode(f"{tempfile.gettempdir()}{SOCKET}")) <= SOCKET_BYTES else "/tmp"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".")
