"""Updates of weights between pools, and to a sampler's process, that are damaged, lost, late or refused, in whole runs."""

import contextlib
import re
import socket
import threading

import psutil
import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

FAULTS = """
import os, signal, time
from pathlib import Path
from engine_core.contracts import weight_sync
from engine_core.errors import DataError
from engine_core.specs import RolloutBackend
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_processes.transports import tcp

FILE = Path(__file__).parent / "fault"
stream_of, verify, flat_buckets, post = weight_sync.stream_of, tcp.verify, tcp.flat_buckets, tcp.TCP.send
sending = [0]  # the version


def due(name, version):
    # Whether the file names this fault, in the update to version 2; once.
    if version != 2 or not FILE.exists() or FILE.read_text() != name:
        return False
    FILE.rename(FILE.with_name("happened"))
    return True


def receive(endpoint, update, header, expected, data):
    if due("damaged", update.version):
        data[0] ^= 1
    if due("other version", update.version):
        header = {**header, "version": 77}
    if due("receiver dies", update.version):
        os.kill(os.getpid(), signal.SIGKILL)
    return verify(endpoint, update, header, expected, data)


def send(transport, stream, update):
    sending[0] = update.version
    return post(transport, stream, update)


def buckets(*given, **named):
    for bucket in flat_buckets(*given, **named):
        if due("silent", sending[0]):
            time.sleep(600)
        if due("sender dies", sending[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield bucket


def failing(*given, **named):
    for each in stream_of(*given, **named):
        if due("stream fails", sending[0]):
            raise DataError("a shard of the actor cannot be read")
        yield each


tcp.verify, tcp.flat_buckets, tcp.TCP.send = receive, buckets, send
weight_sync.stream_of = failing


class Sampler(HFRolloutEngine):
    def update_weights(self, stream, version):
        if due("asleep", version):
            self.sleep()
        return super().update_weights(stream, version)


@hookimpl
def engine_rollout_engines():
    return {"updated": RolloutBackend(load=Sampler, config=HFOptions)}
"""
POOLS = {
    "rollout.backend": "updated",
    "rollout.transport": "tcp",
    "rollout.tcp": {"timeout_seconds": 4.0},
    "runtime.backend": "torchrun",
    "placement.pools": {"train": 1, "serve": 1},
    "placement.actor": "train",
    "placement.rollout": "serve",
    "run.steps": 3,
}
BOTH = r"from actor\[0\] on \S+ to rollout\[1\] on \S+ "
ENDS = {  # exit code, what is said
    "stream fails": (4, r"engine: a shard of the actor cannot be read"),
    "asleep": (3, r"tiny\.py.* failed: RuntimeError: The sampler is asleep: its weights cannot be updated"),
    "damaged": (6, BOTH + r".*bucket 0 came damaged: its checksum is not the one that was sent"),
    "other version": (
        6,
        BOTH + r".*expected \{'update': \d+, 'version': \d+, 'bucket': 0\}, but \{'version': 77\} came",
    ),
    "silent": (6, BOTH + r".*rollout\.tcp\.timeout_seconds"),
    "sender dies": (6, r"Lost worker actor\[0\] on .*killed by SIGKILL"),
    "receiver dies": (6, r"Lost worker rollout\[1\] on .*killed by SIGKILL"),
}


@pytest.fixture
def fault(engine):
    def plan(name):
        (engine.folder / "happened").unlink(missing_ok=True)
        (engine.folder / "fault").write_text(name)

    return plan


@contextlib.contextmanager
def strangers(run):
    """Connect to each port on which the run's workers listen, once with nonsense and once in silence, and stay."""
    called, over = {}, threading.Event()

    def call():
        while not over.wait(0.1):
            for process in run.family():
                with contextlib.suppress(psutil.Error, OSError):
                    if "engine_plugin_processes.worker" not in process.cmdline():
                        continue
                    for port in [
                        each.laddr.port for each in process.net_connections() if each.status == "LISTEN"
                    ]:
                        if port not in called:
                            called[port] = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
                            called[port][0].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 60)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield called
    over.set()
    thread.join()
    for connection in (each for pair in called.values() for each in pair):
        connection.close()


def test_an_update_between_pools_that_fails_ends_the_run_with_both_sides_and_a_resume_loses_nothing(
    engine, tiny, tiny_plugin, hurting, fault, straight, result
):
    tiny(POOLS, plugin=tiny_plugin + FAULTS)
    command = ["train", "run.toml"]
    for name, (code, said) in ENDS.items():
        fault(name)
        run = hurting.ended(engine.start(*command))
        assert (engine.folder / "happened").exists(), (name, run.err)
        assert run.code == code, (name, run.err)
        assert re.search(said, run.err), (name, run.err)
        assert "The newest checkpoint is of step 1. Resume: engine resume" in run.err
        command = ["resume", "r"]
    # one who stays silent is rejected after 5 seconds
    resumed = engine.start("resume", "r", "--set", "rollout.tcp.timeout_seconds=60")
    with strangers(resumed) as called:
        hurting.ended(resumed)
    assert resumed.code == 0, resumed.err
    assert called
    assert result() == straight(POOLS, plugin=tiny_plugin + FAULTS, patience=hurting.patience)
