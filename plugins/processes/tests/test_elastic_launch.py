"""What an external torchrun tells a process; tests/integration/test_two_nodes.py starts one."""

import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest
from torch.distributed import TCPStore

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_plugin_processes import elastic_launch
from engine_plugin_processes.channel import Channel, Closed, listen, new_token
from engine_plugin_processes.elastic_launch import (
    LOST,
    ConnectionLost,
    _next_session,
    controlling,
    launched,
    loopback_interface,
    serve,
)
from engine_plugin_processes.torchrun import TorchrunRuntime
from engine_plugin_processes.worker_process import WorkerHandle

TOLD = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_rank_world_and_rendezvous_are_read():
    launch = launched(TOLD)
    assert (launch.rank, launch.world_size) == (3, 4)
    assert launch.store_of("train") == ("127.0.0.1", 29500, "engine/0/0/train")
    assert launched({**TOLD, "TORCHELASTIC_RESTART_COUNT": "2"}).store_of("a")[2] == "engine/2/0/a"


def test_the_control_channel_is_on_the_address_that_leads_to_the_others():
    assert launched(TOLD).host == "127.0.0.1"


def test_without_torchrun_there_is_nothing_to_read_and_the_command_is_ours(monkeypatch):
    for name in TOLD:
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    assert launched({"RANK": "3", "WORLD_SIZE": "4"}) is None  # another launcher's
    with controlling() as ours:
        assert ours


def test_only_the_first_rank_runs_the_command(monkeypatch):
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    with controlling() as ours:
        assert not ours


def test_nodes_of_different_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"5 processes over nodes of 2.*--nproc-per-node"):
        launched({**TOLD, "WORLD_SIZE": "5"})


def test_the_loopback_interface_has_a_name():
    assert loopback_interface() in {"lo", "lo0"}


def test_ranks_that_do_not_come_are_missed_in_time_however_often_strangers_call(persistent):
    with listen("127.0.0.1") as listener:
        persistent(listener.getsockname())
        with pytest.raises(EnvironmentProblem, match=r"^Rank 1, 3 of 4 did not come within 0\.01 minutes \("):
            launched(TOLD)._take_in(listener, new_token(), {0: None, 2: None}, 0.6)


def test_where_a_rank_is_is_known_also_of_one_whose_connection_is_gone_again():
    with listen("127.0.0.1") as listener:
        caller = socket.create_connection(listener.getsockname())
        channel = Channel(listener.accept()[0])
    there = WorkerHandle(3, channel, None, channel.peer)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()  # as a system does that has given it up
    with pytest.raises(Closed):
        channel.receive()
    runtime = object.__new__(TorchrunRuntime)
    runtime._torchrun, runtime._gathered = launched(TOLD), [None, None, None, there]
    assert runtime._seat(None, 3)["host"] == "127.0.0.1"
    channel.close()


@pytest.fixture
def rank_of(monkeypatch):
    """Makes this process rank 1 of a torchrun whose store is at a port."""

    def make(port):
        for name, value in {**TOLD, "RANK": "1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield make
    for number, handler in before.items():  # which a rank leaves to the controller
        signal.signal(number, handler)


def test_a_rank_ends_with_the_controllers_command_and_is_told_of_the_end_by_its_store(rank_of):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank_of(store.port)
    store.set("engine/0/session/1", "null")
    assert serve() == 0


@pytest.mark.slow
def test_a_rank_whose_store_ends_while_it_waits_ends_with_its_cause(rank_of, monkeypatch, capfd):
    code = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    code += "; print(s.port, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as holder:
        rank_of(int(holder.stdout.readline()))
        monkeypatch.setattr(elastic_launch, "REACH_SECONDS", 1.0)
        threading.Timer(1.0, holder.kill).start()
        assert serve() == LOST
    assert "engine: rank 1 ends: the controller's node at 127.0.0.1:" in capfd.readouterr().err


def test_a_name_server_that_fails_for_a_moment_does_not_end_a_rank(rank_of, monkeypatch):
    asked, ask = [], socket.getaddrinfo

    def fails_twice(*arguments, **more):
        asked.append(arguments)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return ask(*arguments, **more)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank_of(store.port)
    store.set("engine/0/session/1", "null")
    monkeypatch.setattr(elastic_launch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr("socket.getaddrinfo", fails_twice)
    assert serve() == 0
    assert len(asked) == 3


def test_a_name_that_stays_unknown_ends_a_rank_in_bounded_time(monkeypatch):
    def fails(*arguments, **more):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(elastic_launch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(elastic_launch, "REACH_SECONDS", 0.1)
    monkeypatch.setattr("socket.getaddrinfo", fails)
    with pytest.raises(
        ConnectionLost, match=r"node at 127\.0\.0\.1:29500 is lost \(.*Name or service not known\)"
    ):
        _next_session(launched(TOLD), 1)
