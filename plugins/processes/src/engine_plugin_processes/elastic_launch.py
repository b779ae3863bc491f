"""Under an external ``torchrun``: rank 0's process is the controller, the other processes become workers.

``torchrun`` starts the same command on every rank. For each session (a started runtime) the controller writes its
address into torchrun's store. Every other rank waits for the address, starts a worker process that is connected to the
controller, and waits for the next session when that worker has ended, until the controller's command ends.

The control channel listens on the address by which the other nodes reach rank 0 and accepts only peers that know the
run's token. The token is ``ENGINE_TOKEN`` if it is set on every node. Otherwise it is made for the run and passed
through torchrun's store, which every process that reaches the store can read.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from engine_plugin_processes.worker_process import WorkerHandle

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TOKEN = "ENGINE_TOKEN"
STORE_TIMEOUT = datetime.timedelta(seconds=15)  # for torchrun's store to accept a connection
REACH_SECONDS = 15.0  # without an answer of torchrun's store, its node counts as lost
LOOK_SECONDS = 1.0  # between two looks for the next session
GRACE_SECONDS = 10.0  # for a worker to end once the controller has closed its connections
LOST = 6  # exit code of a rank that can no longer reach the controller's node
_sessions = 0  # runtimes that this process has started


@dataclass(frozen=True)
class Launch:
    """The environment that torchrun set for this process."""

    rank: int
    world_size: int
    local_world_size: int
    address: str
    port: int
    attempt: int

    @property
    def host(self) -> str:
        """The address at which this node is reached."""
        return _own_address(self.address, self.port)

    def store_of(self, pool: str) -> tuple[str, int, str]:
        """Return host, port and prefix of the rendezvous of a pool in this session."""
        return self.address, self.port, f"engine/{self.attempt}/{_sessions}/{pool}"

    def gather(self, seconds: float) -> list[WorkerHandle]:
        """Start a session and return its workers by rank: rank 0's is started as a child, the others connect.

        Raises:
            EnvironmentProblem: the address cannot be listened on, or a rank did not connect in time.
        """
        from engine_plugin_processes.channel import listen, new_token
        from engine_plugin_processes.worker_process import WorkerHandle

        token = os.environ.get(TOKEN) or new_token()
        try:
            listener = listen(self.host)
        except OSError as error:
            raise EnvironmentProblem(f"No control channel on {self.host}: {error}.") from error
        workers: dict[int, WorkerHandle] = {}
        with listener:
            global _sessions
            _sessions += 1
            host, port = listener.getsockname()[:2]
            shown = (
                None if os.environ.get(TOKEN) else token
            )  # every process that reaches the store can read it
            about = json.dumps({"host": host, "port": port, "token": shown})
            _store(self).set(self._key(_sessions), about)
            try:
                workers[0] = WorkerHandle.start(0, {})
                self._take_in(listener, token, workers, seconds)
            except BaseException:
                for worker in workers.values():
                    worker.kill()
                raise
        return [workers[rank] for rank in range(self.world_size)]

    def _take_in(
        self, listener: socket.socket, token: str, workers: dict[int, WorkerHandle], seconds: float
    ) -> None:
        """Wait for two connections of each other rank, for commands and an idle one; a peer without the token, or with an unexpected rank, is rejected.

        Raises:
            EnvironmentProblem: a rank did not connect in time.
        """
        from engine_plugin_processes.channel import callers
        from engine_plugin_processes.worker_process import WorkerHandle

        missing = set(range(self.world_size)) - set(workers)
        with contextlib.closing(callers(listener, token, time.monotonic() + seconds)) as coming:
            while missing:
                found = next(coming, None)
                if found is None:
                    raise EnvironmentProblem(
                        f"Rank {', '.join(map(str, sorted(missing)))} of {self.world_size} did not come within "
                        f"{seconds / 60:g} minutes (runtime.torchrun.startup_timeout_minutes). Does torchrun run the same command "
                        f"on every node, with the same {TOKEN}?"
                    )
                rank, channel = found
                if rank not in missing:
                    channel.close()
                elif rank not in workers:
                    workers[rank] = WorkerHandle(rank, channel, None, channel.peer)
                else:
                    workers[rank].watch(channel)
                    missing.remove(rank)

    def _key(self, session: int) -> str:
        return f"engine/{self.attempt}/session/{session}"


def launched(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return the environment that an external torchrun set for this process; None without torchrun.

    Raises:
        ConfigError: the nodes have different numbers of processes.
    """
    env = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in env or "RANK" not in env:
        return None
    world, local = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    if world % local:
        raise ConfigError(
            f"torchrun: {world} processes over nodes of {local}. Start as many on every node (--nproc-per-node)."
        )
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
    return Launch(int(env["RANK"]), world, local, env["MASTER_ADDR"], int(env["MASTER_PORT"]), attempt)


@contextmanager
def controlling() -> Iterator[bool]:
    """Yield whether this process runs its command; afterwards announce to the other ranks that no session follows."""
    launch = launched()
    try:
        yield launch is None or launch.rank == 0
    finally:
        if launch is not None and launch.rank == 0:
            with contextlib.suppress(RuntimeError):  # no store: torchrun and the other ranks have ended
                _store(launch).set(launch._key(_sessions + 1), json.dumps(None))


def serve() -> int:
    """Run a rank that is not the controller: a worker for each session. Return the exit code.

    torchrun sends the signals that end a run to every rank; only the controller reacts to them.
    """
    launch = launched()
    assert launch is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    session = 1
    try:
        while (session_info := _next_session(launch, session)) is not None:
            _work(launch, session_info)
            session += 1
    except ConnectionLost as lost:
        print(f"engine: rank {launch.rank} ends: {lost}", file=sys.stderr)
        return LOST
    return 0


class ConnectionLost(Exception):
    """An error: the controller or its node can no longer be reached."""


def _next_session(launch: Launch, session: int) -> Mapping[str, Any] | None:
    """Wait, for days if necessary, for the controller's announcement of a session; return None if no session follows.

    Each look opens a new connection to torchrun's store: one to a lost host would block forever.

    Raises:
        ConnectionLost: the store was not reached for ``REACH_SECONDS``.
    """
    seen = time.monotonic()
    while True:
        try:
            socket.create_connection((launch.address, launch.port), REACH_SECONDS).close()
            store = _store(launch)
            if store.check([launch._key(session)]):
                return json.loads(store.get(launch._key(session)))
            seen = time.monotonic()
        except (OSError, RuntimeError) as error:  # ``RuntimeError``: torch's errors of stores
            if time.monotonic() - seen > REACH_SECONDS:
                raise ConnectionLost(
                    f"the controller's node at {launch.address}:{launch.port} is lost ({error})"
                ) from error
        time.sleep(LOOK_SECONDS)


def loopback_interface() -> str | None:
    """Return the name of this machine's loopback interface; None if it has neither ``lo`` nor ``lo0``."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _work(launch: Launch, session_info: Mapping[str, Any]) -> None:
    """Run the worker process of one session with a connection to the controller, which judges how the worker ends.

    Raises:
        ConnectionLost: the controller that announced the session cannot be reached, or does not know the token.
    """
    from engine_plugin_processes.channel import Closed, connect, end_with

    token = session_info["token"] or os.environ.get(TOKEN, "")
    try:
        address = session_info["host"], session_info["port"]
        channel, line = (connect(address, token, launch.rank, 60.0) for _ in range(2))
    except (Closed, OSError) as error:
        raise ConnectionLost(f"no connection to the controller: {error}") from error
    with channel.socket as connection:
        command = [sys.executable, "-P", "-m", "engine_plugin_processes.worker", str(connection.fileno())]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[connection.fileno()], start_new_session=True
        )

    def end(_: Closed) -> None:
        """End a worker that outlives the connection to the controller's host."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        child.kill()

    end_with(line, end)
    code = child.wait()
    line.close()
    if code < 0:
        print(
            f"engine: the worker of rank {launch.rank} was killed by {signal.Signals(-code).name}",
            file=sys.stderr,
        )


def _store(launch: Launch) -> Any:
    """Connect to torchrun's store."""
    import torch.distributed as dist

    return dist.TCPStore(launch.address, launch.port, is_master=False, timeout=STORE_TIMEOUT)


def _own_address(address: str, port: int) -> str:
    """Return this node's address on the route to another; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


class ElasticLauncher:
    """The part ``launcher``: ``controlling`` and ``serve``."""

    controlling = staticmethod(controlling)
    serve = staticmethod(serve)
