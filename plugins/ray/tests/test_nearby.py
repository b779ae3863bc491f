"""Workers on the controller's node are reached over sockets, others by Ray; both end correctly."""

import os
import signal
import socket

import psutil
import pytest

from engine_plugin_processes.channel import Closed, listen, new_token
from engine_plugin_ray import nearby
from engine_plugin_ray.actor import Seat
from engine_plugin_ray.mail import ControllerEnd, Store
from engine_plugin_ray.nearby import NearEnd
from engine_plugin_ray.plugin import RayOptions
from engine_plugin_ray.runtime import RayRuntime

pytestmark = pytest.mark.slow
SECONDS = 60.0


@pytest.fixture
def seats(cluster):
    """Return two actors, where they run, and a runtime that is not started."""
    import ray

    made = ray.remote(concurrency_groups={"inbox": 1, "outbox": 1})(Seat)
    actors = [made.options(num_cpus=1).remote({}, None, os.getcwd()) for _ in range(2)]
    about = ray.get([actor.about.remote() for actor in actors], timeout=SECONDS)
    runtime = RayRuntime.__new__(RayRuntime)
    runtime.options, runtime.store, runtime._token = RayOptions(), Store(), new_token()
    yield runtime, dict(enumerate(actors)), about
    for actor in actors:
        ray.kill(actor)


def ends_when_asked(end):
    end.send({"kind": "stacks"})
    assert "stacks" in end.receive()
    end.send({"kind": "close"})
    with pytest.raises(Closed):
        end.receive()
    assert end.over.wait(SECONDS)
    assert end.loss == ""


def test_a_worker_of_this_node_has_a_socket_and_one_of_another_node_has_methods_of_its_actor(seats):
    runtime, actors, about = seats
    elsewhere = [about[0], about[1] | {"node": "another"}]
    ends = runtime._connect(actors, elsewhere, about[0]["node"])
    assert {rank: type(end) for rank, end in ends.items()} == {0: NearEnd, 1: ControllerEnd}
    for end in ends.values():
        ends_when_asked(end)


def test_all_messages_go_by_ray_where_the_file_says_so(seats):
    runtime, actors, about = seats
    runtime.options = RayOptions(worker_transport="ray")
    ends = runtime._connect(actors, about, about[0]["node"])
    assert [type(end) for end in ends.values()] == [ControllerEnd, ControllerEnd]
    for end in ends.values():
        ends_when_asked(end)


def test_an_actor_that_is_killed_closes_its_socket_and_ray_says_why(seats):
    runtime, actors, about = seats
    end = runtime._connect(actors, about, about[0]["node"])[0]
    os.kill(about[0]["pid"], signal.SIGKILL)
    with pytest.raises(Closed):
        end.receive()
    assert end.over.wait(SECONDS)
    assert "worker process has died" in end.loss


def test_strangers_at_the_socket_hold_up_no_worker(seats, monkeypatch):
    """Silent peers stay until their handshake times out; one after the other, they would take most of a minute."""
    runtime, actors, about = seats
    strangers = []

    def with_strangers(host):
        listener = listen(host)
        strangers.extend(socket.create_connection(listener.getsockname()) for _ in range(5))
        return listener

    monkeypatch.setattr(nearby, "listen", with_strangers)
    runtime.options = RayOptions(startup_timeout_minutes=0.5)
    ends = runtime._connect(actors, about, about[0]["node"])
    assert [stranger.recv(1) for stranger in strangers] == [b""] * 5
    for end in ends.values():
        ends_when_asked(end)


def test_workers_have_the_priority_of_the_controller_and_nobody_reads_their_logs(seats, cluster):
    _, _, about = seats
    assert {psutil.Process(found["pid"]).nice() for found in about} == {psutil.Process().nice()}
    running = [p.cmdline() for p in psutil.process_iter() if p.ppid() == os.getpid()]
    assert running
    assert not [words for words in running if any(word.endswith("log_monitor.py") for word in words)]
