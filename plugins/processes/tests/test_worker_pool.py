"""Commands, answers and losses, with workers that are threads which say what a test has them say."""

import socket
import threading
import time

import pytest

from engine_core.errors import DataError, WorkerLost
from engine_plugin_processes import worker_pool as module
from engine_plugin_processes.channel import Channel, Closed
from engine_plugin_processes.remote_errors import pack
from engine_plugin_processes.worker_pool import WorkerPool
from engine_plugin_processes.worker_process import WorkerHandle


class Scripted:
    """A worker that answers each command by ``script(message, channel)``."""

    def __init__(self, rank, script):
        ours, theirs = socket.socketpair()
        self.handle = WorkerHandle(rank, Channel(ours), None, f"host{rank}")
        self.handle.roles = ("actor",)
        self.channel, self.script, self.heard = Channel(theirs), script, []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        try:
            while True:
                message = self.channel.receive()
                self.heard.append(message)
                if message["kind"] == "close":
                    return
                self.script(message, self.channel)
        except Closed:
            return


def echo(message, channel):
    if "id" in message and message["kind"] != "interrupt":
        channel.send({"id": message["id"], "value": message.get("text")})


def silent(message, channel):
    if message["kind"] == "stacks":
        channel.send({"stacks": [("/x/plugin.py", 3, "forward")]})


def raises(error):
    def script(message, channel):
        channel.send({"id": message["id"], "error": pack(error)})

    return script


def dies(message, channel):
    channel.close()


@pytest.fixture
def make():
    made = []

    def crew(*scripts, stall=60.0):
        workers = [Scripted(rank, script) for rank, script in enumerate(scripts)]
        made.append(WorkerPool([worker.handle for worker in workers], stall))
        made[-1].scripted = workers
        return made[-1]

    yield crew
    for each in made:
        each.close()


def send(crew, method="infer", ranks=None, **settings):
    crew.count = getattr(crew, "count", 0) + 1
    message = {"kind": "call", "text": f"{method} {crew.count}"}
    ranks = range(len(crew.workers)) if ranks is None else ranks
    return crew.send(dict.fromkeys(ranks, message), ("actor", method), **settings)


def test_results_of_leaders_are_merged_and_groups_work_at_the_same_time(make):
    crew = make(echo, echo, silent)
    hanging = send(crew, ranks=[2])
    done = send(crew, ranks=[0, 1], leaders=[1, 0], merge=lambda results: results)
    assert done.result(10) == ["infer 2", "infer 2"]
    assert not hanging.done()


def test_an_error_comes_back_as_itself_and_ours_before_others(make):
    crew = make(raises(RuntimeError("the peer is gone")), raises(DataError("no such file")))
    with pytest.raises(DataError, match="no such file"):
        send(crew).result(10)
    assert crew.broken is None


def test_a_rank_that_waits_for_one_that_failed_does_not_hold_the_error_up(make, monkeypatch):
    monkeypatch.setattr(module, "STRAGGLER_SECONDS", 0.3)
    crew = make(raises(DataError("no such file")), silent)
    with pytest.raises(DataError, match="no such file"):
        send(crew).result(10)
    while crew.broken is None:
        time.sleep(0.01)
    with pytest.raises(
        WorkerLost,
        match=r"actor\[1\] on host1: it still waits in 'infer', in which rank 0 has failed: DataError",
    ):
        send(crew).result(10)


def test_a_worker_that_ends_is_told_with_role_rank_and_host_by_all_commands(make):
    crew = make(silent, dies)
    first = send(crew, ranks=[0])
    second = send(crew, method="save")
    with pytest.raises(WorkerLost, match=r"actor\[1\] on host1: its connection ended") as lost:
        second.result(10)
    assert (lost.value.role, lost.value.rank, lost.value.host, lost.value.exit_code) == (
        "actor",
        1,
        "host1",
        6,
    )
    with pytest.raises(WorkerLost):
        first.result(10)
    with pytest.raises(WorkerLost):
        send(crew).result(10)


def test_the_loss_of_a_rank_is_told_rather_than_what_it_did_to_another(make):
    crew = make(raises(RuntimeError("connection closed by peer")), dies)
    with pytest.raises(WorkerLost, match=r"\[1\]"):
        send(crew).result(10)


def test_a_rank_past_its_deadline_is_lost_with_where_it_is(make):
    crew = make(echo, silent, stall=0.3)
    with pytest.raises(
        WorkerLost,
        match=r"\[1\].*no answer to 'infer' within .* forward \(/x/plugin.py:3\); answered: rank 0",
    ):
        send(crew).result(10)


def test_a_deadline_counts_from_when_the_rank_is_at_the_command(make):
    def slow(message, channel):
        time.sleep(0.5)
        echo(message, channel)

    crew = make(slow, stall=2.0)
    replies = [send(crew) for _ in range(5)]  # the last is answered after 2.5 seconds
    assert replies[-1].result(30) == "infer 5"


def test_results_that_come_later_are_a_future_of_all_ranks(make):
    settle = threading.Event()

    def saves(message, channel):
        channel.send({"id": message["id"], "pending": True})
        settle.wait(10)
        channel.send({"id": message["id"], "settled": True, "error": None})

    def fails(message, channel):
        channel.send({"id": message["id"], "pending": True})
        channel.send(
            {"id": message["id"], "settled": True, "error": pack(OSError(28, "No space left on device"))}
        )

    crew = make(saves, fails)
    later = send(crew).result(10)
    assert not later.done()
    settle.set()
    with pytest.raises(OSError, match="No space left"):
        later.result(10)
    assert send(make(saves)).result(10).result(10) is None


def test_an_error_at_once_is_told_when_the_others_have_written(make):
    """Who clears the files of a failed save away must find nobody at work on them."""
    writes = threading.Event()

    def later(message, channel):
        channel.send({"id": message["id"], "pending": True})
        writes.wait(10)
        channel.send({"id": message["id"], "settled": True, "error": None})

    crew = make(later, raises(OSError(28, "No space left on device")))
    reply = send(crew, "save")
    with pytest.raises(TimeoutError):
        reply.result(0.5)
    writes.set()
    with pytest.raises(OSError, match="No space left"):
        reply.result(10)


def test_who_is_interrupted_while_waiting_gives_the_command_up_where_that_is_safe(make):
    crew = make(silent, silent)
    for interruptible in (True, False):
        reply = send(crew, interruptible=interruptible)

        def interrupted(*_):
            raise KeyboardInterrupt

        reply._condition.wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            reply.result()
    asked = [m for m in crew.scripted[0].heard if m["kind"] == "interrupt"]
    deadline = time.monotonic() + 10
    while not asked and time.monotonic() < deadline:
        time.sleep(0.01)
        asked = [m for m in crew.scripted[0].heard if m["kind"] == "interrupt"]
    assert [m["id"] for m in asked] == [1]


def test_what_a_thread_asked_for_and_does_not_wait_for_is_given_up_where_that_is_safe(make):
    """A signal's exception comes before the wait begins: the reply itself is lost."""
    crew = make(silent)
    other = threading.Thread(target=send, args=(crew,), kwargs={"interruptible": True})
    other.start()
    other.join()
    send(crew, interruptible=False)
    send(crew, interruptible=True)
    crew.give_up()
    send(crew, interruptible=True)  # afterwards
    deadline = time.monotonic() + 10
    while len(crew.scripted[0].heard) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [m["id"] for m in crew.scripted[0].heard if m["kind"] == "interrupt"] == [3]


def test_what_does_not_cross_is_told_to_the_caller(make):
    crew = make(echo)
    with pytest.raises(TypeError, match="does not cross"):
        crew.send({0: {"kind": "call", "plain": {"f": len}}}, ("actor", "infer"))
    assert send(crew).result(10) == "infer 1"


def test_nonsense_from_a_worker_loses_it(make):
    def nonsense(message, channel):
        channel.socket.sendall(b"\xff" * 64)

    with pytest.raises(WorkerLost, match="it sent something else than an answer"):
        send(make(nonsense)).result(10)


def test_after_close_nothing_is_left_open(make):
    crew = make(echo, silent)
    reply = send(crew, ranks=[1])
    crew.close()
    with pytest.raises(WorkerLost, match="the run has ended"):
        reply.result(10)
    with pytest.raises(WorkerLost, match="the run has ended"):
        send(crew).result(10)
    for worker in crew.scripted:
        worker.thread.join(10)
        assert not worker.thread.is_alive()


def test_a_command_that_is_given_while_the_run_ends_is_not_waited_for(make):
    crew = make(echo)
    join, late = crew._watcher.join, []

    def joined():
        late.append(send(crew))
        join()

    crew._watcher.join = joined
    crew.close()
    with pytest.raises(WorkerLost, match="the run has ended"):
        late[0].result(10)


def test_a_sender_that_is_still_writing_while_the_run_ends_ends_as_well(make, monkeypatch):
    crew, may_go_on, writes = make(echo), threading.Event(), threading.Event()
    channel = crew.workers[0].channel

    def slow(message, send=channel.send):
        writes.set()
        may_go_on.wait(10)
        send(message)

    monkeypatch.setattr(channel, "send", slow)
    replies = [send(crew), send(crew)]
    assert writes.wait(10)
    crew.close()
    may_go_on.set()
    for reply in replies:
        with pytest.raises(WorkerLost, match="the run has ended"):
            reply.result(10)


def gather(results):
    return list(results)


def test_a_worker_that_may_be_lost_is_left_out_and_the_others_go_on(make):
    crew = make(echo, dies, echo)
    lost = []
    crew.may_lose = lambda worker, loss: lost.append(loss) is None
    together = send(crew, leaders=[0, 1, 2], merge=gather)
    assert together.result(10) == ["infer 1", "infer 1"]
    with pytest.raises(WorkerLost, match=r"actor\[1\] on host1"):
        send(crew, ranks=[1]).result(10)
    assert send(crew, leaders=[1], merge=gather).result(10) == [
        "infer 3"
    ]  # the first that is there speaks for it
    assert (crew.broken, [loss.rank for loss in lost]) == (None, [1])


def test_a_command_in_hand_of_a_worker_that_is_lost_fails_alone(make):
    release = threading.Event()

    def later(message, channel):
        release.wait(10)
        echo(message, channel)

    crew = make(later, dies)
    crew.may_lose = lambda worker, loss: True
    slow, gone = send(crew, ranks=[0]), send(crew, ranks=[1])
    with pytest.raises(WorkerLost):
        gone.result(10)
    release.set()
    assert slow.result(10) == "infer 1"


def test_a_new_worker_comes_in_the_place_of_one_that_was_lost(make):
    crew = make(echo, dies)
    crew.may_lose = lambda worker, loss: True
    with pytest.raises(WorkerLost):
        send(crew, ranks=[1]).result(10)
    new = Scripted(1, echo)
    crew.admit(new.handle)
    assert send(crew, ranks=[1]).result(10) == "infer 2"
    assert crew.absent == {}


def test_the_end_of_a_worker_that_was_dismissed_is_no_loss_and_commands_go_on_without_it(make):
    crew = make(echo, silent)
    asked = []
    crew.may_lose = lambda worker, loss: bool(asked.append(worker))
    both = send(crew)
    crew.dismiss(crew.workers[1], "it was asked to leave")
    assert both.result(10) == "infer 1"
    crew.workers[1].kill()
    alone = send(crew, ranks=[1])
    with pytest.raises(WorkerLost, match=r"actor\[1\] on host1: it was asked to leave"):
        alone.result(10)
    assert send(crew).result(10) == "infer 3"
    assert (asked, crew.broken) == ([], None)


def test_what_a_worker_says_that_the_run_goes_on_without_is_not_taken_for_an_answer_of_another(make):
    """One that leaves, or was silent for too long, may still be at a command that the others are at."""
    turn = [threading.Event(), threading.Event()]

    def in_turn(message, channel):
        turn[message["text"][-1] == "late"].wait(10)
        echo(message, channel)

    crew = make(in_turn, in_turn)
    messages = {rank: {"kind": "call", "text": [f"of {rank}", "soon"]} for rank in (0, 1)}
    messages[0]["text"][-1] = "late"
    reply = crew.send(messages, ("actor", "infer"), leaders=[0, 1], merge=gather)
    while not crew.open:
        time.sleep(0.01)
    crew.dismiss(crew.workers[1], "it leaves")
    turn[0].set()
    time.sleep(0.2)
    assert not reply.done()
    turn[1].set()
    assert reply.result(10) == [["of 0", "late"]]
