"""The cluster of a run: one of its own on this machine, or one that it joins.

A cluster of the run's own listens on the loopback interface alone, asks for a token that is made for this process,
has no dashboard, tells nobody that it is used, and keeps its files in a folder of its own, which a ``keeper``
removes with all of the cluster's processes when the controller ends, however that ends.
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
"""Environment of a cluster of the run's own; the last: its nodes are at the loopback address."""
LEAN = {
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""The same, where the environment says nothing else. Ray's own 15 would let any other process of the machine go before
the workers; nobody asks a cluster of the run's own for its metrics or for a list of its tasks."""
PRESTART = "RAY_prestart_worker_first_driver"  # Ray starts as many workers as there are CPUs
SOCKET_BYTES = 107  # of the name of a socket
SOCKET = "/engine-ray-12345678/ray/session_2026-01-02_03-04-05_123456_1234567/sockets/plasma_store"
"""The longest that Ray makes below the temporary folder."""
_TOKEN = secrets.token_hex(32)  # one a process: Ray reads it once


class Cluster:
    """A connection to Ray. ``close`` ends what this object has started."""

    def __init__(self, address: str) -> None:
        self.address = address  # as the file has it
        self.folder: str | None = None  # of a cluster of our own; nobody else may enter it
        self._connected = False  # by us
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pipe: FileIO | None = None

    @property
    def own(self) -> bool:
        """Whether the cluster ends with this object."""
        return self.folder is not None

    @property
    def shown(self) -> str:
        """For messages."""
        return f"the cluster at '{self.address}'" if self.address else "the cluster of this machine"

    def start(self, cpus: float, gpus: int, object_store_mib: int, workers: int) -> None:
        """Start a cluster of our own.

        Args:
            cpus: that it counts.
            gpus: of this machine that it may use.
            object_store_mib: size of the object store.
            workers: processes that the run asks for.

        Raises:
            ConfigError: the object store takes what the machine has.
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
            ConfigError: nobody answers there, it asks for another token, or it is of another version.
        """
        import ray

        if ray.is_initialized():  # by the program that this run is part of
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
        """Leave the cluster; one of our own ends, with its folder."""
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
        """Where processes of this node write."""
        import ray

        node: Any = ray._private.worker._global_node
        return None if node is None else Path(node.get_logs_dir_path())

    def _end_log_monitor(self) -> None:
        """It reads what workers print for drivers that ask for it; ``_quiet`` does not."""
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
        """What to do about a cluster that answers and could not be joined."""
        at, text = f"runtime.ray.address = '{self.address}'", " ".join(str(error).split())
        return (
            f"{at}: the cluster cannot be joined: {type(error).__name__}: {text:.300}. engine runs on a node of the "
            f"cluster: make this machine one with 'ray start --address={found}'."
        )


def _quiet() -> dict[str, Any]:
    """What the workers say comes by our own channel."""
    return {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": f"engine-{secrets.token_hex(8)}",
    }


def asks_for_token() -> bool:
    """Whether the cluster that this process belongs to does."""
    from ray._raylet import AuthenticationMode, get_authentication_mode

    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)


def _read_settings_again() -> None:
    """Ray reads its environment when it is imported, and a token once."""
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
    """Ray has read its constant when it was imported, perhaps before ``OWN`` was set."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; it saves a run here."""
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
    """Where the folder of a cluster of our own is made: None is the temporary folder, unless Ray's sockets there had too long names."""
    return None if len(os.fsencode(f"{tempfile.gettempdir()}{SOCKET}")) <= SOCKET_BYTES else "/tmp"


def _too_large(object_store_mib: int) -> str:
    free = psutil.virtual_memory().available >> 20
    return (
        f"runtime.ray.object_store_mib is {object_store_mib}, and {free} MiB of this machine's memory are free: Ray wants "
        "room for the workers beside the store. Lower it."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(".")
