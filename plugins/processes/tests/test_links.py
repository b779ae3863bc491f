"""Links between pools: made when needed, kept, and made anew when an update has failed or who takes part has changed."""

import socket
import threading

import pytest

from engine_core.errors import TrainingFailed
from engine_plugin_processes import replacement
from engine_plugin_processes.channel import Channel, Closed
from engine_plugin_processes.links import Links
from engine_plugin_processes.placement import Pool
from engine_plugin_processes.remote_errors import pack
from engine_plugin_processes.worker_pool import WorkerPool
from engine_plugin_processes.worker_process import WorkerHandle

TRAIN, SERVE = Pool("train", range(1), ("actor",)), Pool("serve", range(1, 3), ("rollout",))


class Scripted:
    """A worker that answers by ``script(rank, message)``: a value, an error, or None for its end."""

    def __init__(self, rank, script):
        ours, theirs = socket.socketpair()
        self.handle = WorkerHandle(rank, Channel(ours), None, f"host{rank}")
        self.handle.roles = ("actor",) if rank == 0 else ("rollout",)
        self.channel, self.rank, self.script, self.heard = Channel(theirs), rank, script, []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        try:
            while (message := self.channel.receive())["kind"] != "close":
                self.heard.append(message)
                answer = self.script(self.rank, message)
                if answer is None:
                    self.channel.close()
                elif isinstance(answer, Exception):
                    self.channel.send({"id": message["id"], "error": pack(answer)})
                else:
                    self.channel.send({"id": message["id"], "value": answer})
        except Closed:
            return

    def said(self, kind):
        return [message for message in self.heard if message["kind"] == kind]


@pytest.fixture
def make(away_of):
    made = []

    def links(script, may_lose=False):
        workers = [Scripted(rank, script) for rank in range(3)]
        crew = WorkerPool([worker.handle for worker in workers], 60.0)
        replacements = away_of(crew, SERVE.ranks) if may_lose else None
        if may_lose:
            crew.may_lose = replacements.lost
        hosts = {rank: f"10.0.0.{rank}" for rank in range(3)}
        there = lambda pool: [rank for rank in pool.ranks if rank not in crew.absent]  # noqa: E731
        meeting = lambda name: {"file": name}  # noqa: E731
        found = Links(crew, lambda *_: "tcp", there, hosts, meeting, "token", replacements)
        made.append(crew)
        return found, workers

    yield links
    for crew in made:
        crew.close()


def good(rank, message):
    return {"link": (f"at {rank}", "bfloat16" if rank else ""), "join": True, "send": 100, "receive": "sum"}[
        message["kind"]
    ]


def push(links, version=1):
    return links.push(TRAIN, SERVE, ("actor", "rollout"), version, None)


def test_a_link_is_made_once_and_its_updates_are_counted(make):
    links, workers = make(good)
    first, second = push(links), push(links, 2)
    assert (first.bytes, first.checksum, second.version) == (200, "sum", 2)
    (linked,) = workers[1].said("link")
    assert tuple(linked["endpoint"][name] for name in ("index", "host", "transport")) == (
        1,
        "10.0.0.1",
        "tcp",
    )
    assert linked["endpoint"]["names"] == ["actor[0] on host0", "rollout[1] on host1", "rollout[2] on host2"]
    (joined,) = workers[0].said("join")
    assert (joined["peers"], joined["weight_dtype"]) == (["at 0", "at 1", "at 2"], "bfloat16")
    assert [(message["update"], message["version"]) for message in workers[2].said("receive")] == [
        (1, 1),
        (2, 2),
    ]


def test_receivers_whose_weights_have_different_types_get_them_as_they_are(make):
    types = ("bfloat16", "float32", "bfloat16")
    links, workers = make(
        lambda rank, message: (rank, types[rank]) if message["kind"] == "link" else good(rank, message)
    )
    push(links)
    assert workers[0].said("join")[0]["weight_dtype"] == ""


def test_after_an_update_that_failed_the_link_is_made_anew_and_the_old_one_ends(make):
    broken = [TrainingFailed("bucket 3 came damaged")]

    def script(rank, message):
        return broken.pop() if message["kind"] == "receive" and rank == 2 and broken else good(rank, message)

    links, workers = make(script)
    with pytest.raises(TrainingFailed, match="bucket 3 came damaged"):
        push(links)
    push(links)
    first, second = workers[0].said("link")
    assert first["link"] == second["link"]  # the endpoint of the first is closed
    assert first["endpoint"]["link_id"] != second["endpoint"]["link_id"]


def test_what_the_receivers_say_goes_before_what_the_sender_says(make):
    def script(rank, message):
        if message["kind"] == "send":
            return TrainingFailed("the stream of weights broke off")
        return TrainingFailed("came damaged") if message["kind"] == "receive" else good(rank, message)

    with pytest.raises(TrainingFailed, match="came damaged"):
        push(make(script)[0])


def test_one_that_is_lost_in_the_midst_of_an_update_is_left_out_and_the_others_are_given_it_anew(make):
    """The others see the stream break off, and nobody of them is lost."""
    broken = {0, 1, 2}

    def script(rank, message):
        if message["kind"] in ("send", "receive") and rank in broken:
            broken.remove(rank)
            return None if rank == 2 else TrainingFailed("the stream of weights broke off")
        return good(rank, message)

    links, workers = make(script, may_lose=True)
    result = push(links)
    assert (result.bytes, result.checksum) == (100, "sum")
    assert workers[1].said("link")[-1]["endpoint"]["names"] == ["actor[0] on host0", "rollout[1] on host1"]


def test_one_that_was_lost_before_is_not_waited_for(make):
    def script(rank, message):
        return None if rank == 2 and message["kind"] == "memory" else good(rank, message)

    links, workers = make(script, may_lose=True)
    push(links)
    workers[2].channel.close()
    while not links.crew.absent:
        threading.Event().wait(0.01)
    assert push(links, 2).bytes == 100
    assert len(workers[1].said("receive")) == 2  # at once, not after a failure


def test_a_link_that_cannot_be_made_is_no_loss_where_some_are_not_there_yet(make, monkeypatch):
    """One that may come and has not is nobody whose loss an update outlives."""
    monkeypatch.setattr(replacement, "LOSS_SECONDS", 0.2)
    linked = threading.Semaphore(3)  # so many times at the most, so that the test ends

    def script(rank, message):
        if message["kind"] == "link" and rank == 1 and linked.acquire(blocking=False):
            return TrainingFailed("no port is free")
        return good(rank, message)

    links, workers = make(script, may_lose=True)
    workers[2].channel.close()
    while not links.crew.absent:
        threading.Event().wait(0.01)
    with pytest.raises(TrainingFailed, match="no port is free"):
        push(links)
    assert len(workers[1].said("link")) == 1
