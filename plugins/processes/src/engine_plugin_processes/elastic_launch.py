"""Under an external ``torchrun``: rank 0's process is the controller, the others become workers.

``torchrun`` starts the same command on every rank. The controller writes where it listens into torchrun's store,
once a session (a runtime that is started); every other rank waits for it there, starts a worker process that is
connected to the controller, and waits for the next session when that has ended, until the controller's command ends.

The control channel listens on the address by which the other nodes reach rank 0 and takes only who knows the run's
token: ``ENGINE_TOKEN`` where it is set on every node, else one that is made for the run and handed over in
torchrun's store, which whoever reaches it can read.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
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
STORE_TIMEOUT = datetime.timedelta(days=7)  # rank 0 may read its data for long
LOOK_SECONDS = 10.0  # between two questions whether the controller's node is there, while no session is
REACH_SECONDS = 15.0  # for a host that is there to take a connection
ASK_AGAIN_SECONDS = 1.0  # where its name or the way to it was not found
LOST = 6  # exit code of a rank that cannot reach the controller's node any more
_sessions = 0  # runtimes that this process has started


@dataclass(frozen=True)
class Launch:
    """What torchrun told this process."""

    rank: int
    world_size: int
    local_world_size: int
    address: str
    port: int
    attempt: int

    @property
    def host(self) -> str:
        """The address on which this node is reached."""
        return _own_address(self.address, self.port)

    def local_rank(self, rank: int) -> int:
        """Of a rank of the run; every node has as many."""
        return rank % self.local_world_size

    def store_of(self, pool: str) -> tuple[str, int, str]:
        """Host, port and prefix of the rendezvous of a pool in this session."""
        return self.address, self.port, f"engine/{self.attempt}/{_sessions}/{pool}"

    def gather(self, seconds: float) -> list[WorkerHandle]:
        """Start a session: rank 0's worker as a child, the others as they come; in the order of ranks.

        Raises:
            EnvironmentProblem: the address cannot be listened on, or not all came in time.
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
            self._announce(listener, token)
            try:
                workers[0] = WorkerHandle.start(0, {})
                self._take_in(listener, token, workers, seconds)
            except BaseException:
                for worker in workers.values():
                    worker.kill()
                raise
        return [workers[rank] for rank in range(self.world_size)]

    def _announce(self, listener: socket.socket, token: str) -> None:
        """Tell the other ranks where to come to, and the token where they do not have it."""
        global _sessions
        _sessions += 1
        host, port = listener.getsockname()[:2]
        shown = None if os.environ.get(TOKEN) else token
        _store(self).set(self._key(_sessions), json.dumps({"host": host, "port": port, "token": shown}))

    def _take_in(
        self, listener: socket.socket, token: str, workers: dict[int, WorkerHandle], seconds: float
    ) -> None:
        """Wait for the other ranks; whoever does not know the token, or is none of them, is sent away."""
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
                if rank in missing:
                    workers[rank] = WorkerHandle(rank, channel, None, channel.peer)
                    missing.remove(rank)
                else:
                    channel.close()

    def _key(self, session: int) -> str:
        return f"engine/{self.attempt}/session/{session}"


def launched(environment: Mapping[str, str] | None = None) -> Launch | None:
    """What an external torchrun told this process; None where there is none.

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
    """Whether this process runs its command; afterwards the other ranks are told that no session comes any more."""
    launch = launched()
    try:
        yield launch is None or launch.rank == 0
    finally:
        if launch is not None and launch.rank == 0:
            with contextlib.suppress(RuntimeError):  # no store: torchrun has ended, and the others with it
                _store(launch).set(launch._key(_sessions + 1), json.dumps(None))


def serve() -> int:
    """Be a rank that is not the controller: a worker for each of its sessions; returns the exit code.

    The signals that end a run are the controller's business: torchrun sends them to every rank.
    """
    launch = launched()
    assert launch is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    session = 1
    try:
        while (told := _next_session(launch, session)) is not None:
            _work(launch, told)
            session += 1
            _reach(launch)  # else the next wait would begin without a word
    except ConnectionLost as lost:
        print(f"engine: rank {launch.rank} ends: {lost}", file=sys.stderr)
        return LOST
    return 0


class ConnectionLost(Exception):
    """The controller or its node cannot be reached any more."""


def _next_session(launch: Launch, session: int) -> Mapping[str, Any] | None:
    """Wait for what the controller says of a session, for days where need be; None: none comes any more.

    The wait is a thread's: an open connection to a host that is gone waits for ever, also to give up a wait, so
    that this one asks the host now and then whether it takes another.

    Raises:
        ConnectionLost: it does not, or torchrun's store has ended.
    """
    answers: queue.SimpleQueue[bytes | RuntimeError] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put(_store(launch).get(launch._key(session)))
        except RuntimeError as error:  # torch's errors of stores
            answers.put(error)

    # consumes: nothing; waits for: torchrun's store; unblocked by: the controller, the end of the store;
    # produces: one answer. A daemon: it may wait for ever
    threading.Thread(target=wait, name="next-session", daemon=True).start()
    while True:
        try:
            answer = answers.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            _reach(launch)
            continue
        if isinstance(answer, RuntimeError):
            raise ConnectionLost(f"torchrun's store at {launch.address}:{launch.port} has ended ({answer})")
        return json.loads(answer)


def _reach(launch: Launch) -> None:
    """Ask whether the host of torchrun's store is there: whether it takes a connection.

    A host that is there and refuses is asked once. A name that is not found or a way that is not there is asked for again,
    `REACH_SECONDS` long: a run waits for days, and one failure of a name server within them must not end it.

    Raises:
        ConnectionLost: it does not.
    """
    end = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((launch.address, launch.port), REACH_SECONDS).close()
            return
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or time.monotonic() >= end:
                raise ConnectionLost(
                    f"the controller's node at {launch.address}:{launch.port} is lost ({error})"
                ) from error
        time.sleep(ASK_AGAIN_SECONDS)


def loopback_interface() -> str | None:
    """The interface of this machine alone, by the name that it has here."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def _work(launch: Launch, told: Mapping[str, Any]) -> None:
    """One session: a worker process with the connection to the controller, who judges how it ends.

    Raises:
        ConnectionLost: the controller that announced it cannot be reached, or does not know the token.
    """
    from engine_plugin_processes.channel import Closed, connect

    token = told["token"] or os.environ.get(TOKEN, "")
    try:
        channel = connect((told["host"], told["port"]), token, launch.rank, 60.0)
    except (Closed, OSError) as error:
        raise ConnectionLost(f"no connection to the controller: {error}") from error
    with channel.socket as connection:
        command = [sys.executable, "-m", "engine_plugin_processes.worker", str(connection.fileno())]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[connection.fileno()], start_new_session=True
        )
    code = child.wait()
    if code < 0:
        print(
            f"engine: the worker of rank {launch.rank} was killed by {signal.Signals(-code).name}",
            file=sys.stderr,
        )


def _store(launch: Launch) -> Any:
    """torchrun's own."""
    import torch.distributed as dist

    return dist.TCPStore(launch.address, launch.port, is_master=False, timeout=STORE_TIMEOUT)


def _own_address(address: str, port: int) -> str:
    """The address of this node on the way to another; asking for it sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


class ElasticLauncher:
    """The part ``launcher``."""

    controlling = staticmethod(controlling)
    serve = staticmethod(serve)
