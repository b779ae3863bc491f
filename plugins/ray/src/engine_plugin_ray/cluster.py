"""The cluster of a run: a private one on this machine, or an existing one that the run joins.

A private cluster listens on the loopback interface alone, requires a token made for this process, has no dashboard,
sends no usage statistics, and keeps its files in a separate folder. A ``keeper`` removes the folder and kills all
processes of the cluster when the controller ends, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import psutil

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_core.inherited_descriptors import close_in_children
from engine_plugin_ray.address import host_and_port
from engine_plugin_ray.joining import find, meet
from engine_plugin_ray.keeper import MARK, clear

log = logging.getLogger("engine")

KEEPER_SECONDS = 30.0
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
PRESTART = "RAY_prestart_worker_first_driver"  # Ray starts as many workers as there are CPUs
SOCKET_BYTES = 107  # longest name of a socket
SOCKET = "/engine-ray-12345678/ray/session_2026-01-02_03-04-05_123456_1234567/sockets/plasma_store"
"""Longest socket path that Ray makes below the temporary folder."""
_TOKEN = secrets.token_hex(32)  # one a process: Ray reads it once


class Cluster:
    """A connection to Ray. ``close`` ends what this object has started."""

    def __init__(self, address: str) -> None:
        self.address = address  # as in the run file
        self.folder: str | None = None  # of a private cluster; only this user may enter it
        self._connected = False  # by this object
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pipe: FileIO | None = None

    @property
    def own(self) -> bool:
        """Whether the cluster is private and ends with this object."""
        return self.folder is not None

    @property
    def shown(self) -> str:
        """The cluster's name for messages."""
        return f"the cluster at '{self.address}'" if self.address else "the cluster of this machine"

    def start(self, cpus: float, gpus: int, object_store_mib: int, workers: int) -> None:
        """Start a private cluster.

        Args:
            cpus: number of CPUs of the cluster.
            gpus: number of this machine's GPUs that it may use.
            object_store_mib: size of the object store.
            workers: number of processes of the run.

        Raises:
            ConfigError: the object store does not fit into the free memory.
            EnvironmentProblem: Ray does not start here, or would be open to others.
        """
        import ray

        self.folder = tempfile.mkdtemp(prefix="engine-ray-", dir=_short_folder())
        self._watch(self.folder)
        store = object_store_mib << 20
        lean = LEAN | ({PRESTART: "0"} if cpus > workers else {})
        lean = {name: os.environ.get(name, value) for name, value in lean.items()}
        env = {**lean, **OWN, "RAY_AUTH_TOKEN": _TOKEN, MARK: self.folder}
        with _environment(env), _loopback(), _own_signals():
            _read_settings_again()
            try:
                ray.init(
                    "local", num_cpus=math.ceil(cpus), num_gpus=gpus, object_store_memory=store, include_dashboard=False,
                    _temp_dir=f"{self.folder}/ray", **_quiet(),
                )  # fmt: skip
            except Exception as error:
                self.close()
                if "object_store_memory" in str(error):
                    raise ConfigError(_too_large(object_store_mib)) from error
                raise EnvironmentProblem(
                    f"Ray did not start on this machine: {_first_line(error)}."
                ) from error
        self._connected = True
        self._end_log_monitor()
        at = ray.util.get_node_ip_address()
        if at not in LOOPBACK or not asks_for_token():
            self.close()
            raise EnvironmentProblem(
                f"Ray listens on {at} {'with' if asks_for_token() else 'without'} a token; expected the loopback address "
                "and a token. Start a cluster with 'ray start' and name it in runtime.ray.address."
            )
        log.info(
            "Ray %s: a cluster of the run's own at %s, which asks for a token; an object store of %d MiB.",
            ray.__version__, at, object_store_mib,
        )  # fmt: skip

    def join(self) -> None:
        """Join the cluster at ``address``.

        Raises:
            ConfigError: nothing answers there, the cluster requires another token, or it has another version.
        """
        import ray

        if ray.is_initialized():  # by the program that contains this run
            log.info("Ray: this process belongs to a cluster already, which is used.")
            return
        found = find(self.address)
        mode = {"RAY_AUTH_MODE": meet(self.address, found)}
        near = host_and_port(found)[0] in (*LOOPBACK, "localhost")
        with _own_signals(), _environment(mode), _loopback() if near else contextlib.nullcontext():
            _read_settings_again()
            try:
                ray.init(found, **_quiet())
            except Exception as error:
                with contextlib.suppress(Exception):
                    ray.shutdown()
                raise ConfigError(self._refusal(found, error)) from error
        self._connected = True
        log.info("Ray %s: joined the cluster at %s.", ray.__version__, found)

    def close(self) -> None:
        """Leave the cluster; a private one ends, and its folder is removed."""
        if self._connected:
            import ray

            with _own_signals():
                ray.shutdown()
            self._connected = False
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._keeper is not None:
            try:
                self._keeper.wait(KEEPER_SECONDS)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None
        if self.folder is not None and os.path.exists(self.folder):
            clear(self.folder)
        self.folder = None

    @property
    def logs(self) -> Path | None:
        """The folder of the logs of this node's processes."""
        import ray

        node: Any = ray._private.worker._global_node
        return None if node is None else Path(node.get_logs_dir_path())

    def _end_log_monitor(self) -> None:
        """End the process that forwards the workers' output to drivers; ``_quiet`` turns that off."""
        import ray

        node: Any = ray._private.worker._global_node
        if hasattr(node, "kill_log_monitor"):
            node.kill_log_monitor(check_alive=False)

    def _watch(self, folder: str) -> None:
        reading, writing = os.pipe()
        self._pipe = close_in_children(FileIO(writing, "w"))
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "engine_plugin_ray.keeper", str(reading), folder],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[reading], start_new_session=True,
        )  # fmt: skip
        os.close(reading)

    def _refusal(self, found: str, error: Exception) -> str:
        """Return what to do about a cluster that answers but could not be joined."""
        at, text = f"runtime.ray.address = '{self.address}'", " ".join(str(error).split())
        return (
            f"{at}: the cluster cannot be joined: {type(error).__name__}: {text:.300}. engine runs on a node of the "
            f"cluster: make this machine one with 'ray start --address={found}'."
        )


def _quiet() -> dict[str, Any]:
    """Return arguments of ``ray.init`` without the workers' output, which comes by this project's own channel."""
    return {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": f"engine-{secrets.token_hex(8)}",
    }


def asks_for_token() -> bool:
    """Return whether the cluster that this process belongs to requires a token."""
    from ray._raylet import AuthenticationMode, get_authentication_mode

    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)


def _read_settings_again() -> None:
    """Make Ray read its environment again: it reads settings when it is imported, and a token once."""
    from ray._raylet import AuthenticationTokenLoader, Config

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


def _too_large(object_store_mib: int) -> str:
    free = psutil.virtual_memory().available >> 20
    return (
        f"runtime.ray.object_store_mib is {object_store_mib}, and {free} MiB of this machine's memory are free: Ray needs "
        "room for the workers in addition to the store. Lower it."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".")
