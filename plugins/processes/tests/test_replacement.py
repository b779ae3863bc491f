"""Which of a sampler's processes are there, and how many may be lost."""

import threading

from engine_core.errors import ConfigError, WorkerLost
from engine_plugin_processes.replacement import Replacements


class Worker:
    def __init__(self, rank):
        self.rank, self.roles, self.host, self.killed = rank, ("rollout",), "here", False

    def kill(self):
        self.killed = True


class Crew:
    """Takes new workers in, and says that they have started."""

    broken = None

    def __init__(self, error=None):
        self.workers = {rank: Worker(rank) for rank in (1, 2)}
        self.absent = {}
        self.orders, self.error, self.done, self.dismissed = [], error, threading.Event(), []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def admit(self, worker):
        self.workers[worker.rank] = worker

    def dismiss(self, worker, cause):
        self.dismissed.append(worker)
        self.may_answer.set()

    def send(self, messages, *_, **__):
        self.orders.append(messages)
        crew = self

        class Answer:
            def result(self):
                crew.done.set()
                crew.may_answer.wait(10)
                if crew.error:
                    raise crew.error

        return Answer()


def make(crew, budget=1):
    def begin(rank, number):
        return Worker(rank), {"number": number}

    return Replacements(crew, [1, 2], budget, "runtime.x.max_replacements", begin, 1.0)


def loss(rank):
    return WorkerLost("rollout", rank, "here", "gone")


def until(found):
    for _ in range(1000):
        if found():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come")


def test_a_lost_one_is_away_until_its_successor_joins():
    crew = Crew()
    old, made = crew.workers[1], make(crew)
    assert made.lost(old, loss(1))
    assert made.present == [2]
    until(lambda: made._ready)
    assert made.present == [2]  # it has not the current weights yet
    assert made.join()
    assert made.present == [1, 2]
    assert not made.join()
    assert old.killed
    assert crew.workers[1] is not old
    assert crew.orders == [{1: {"number": 1}}]
    assert made.metrics() == {
        "sampling/lost": 1.0, "sampling/joined": 1.0, "sampling/reissued": 0.0, "sampling/samplers": 2.0
    }  # fmt: skip
    assert made.metrics()["sampling/lost"] == 0.0


def test_beyond_the_budget_of_the_last_one_and_of_others_the_session_ends():
    crew = Crew()
    made = make(crew)
    assert not made.lost(Worker(0), loss(0))  # the actor's
    assert made.lost(crew.workers[1], loss(1))
    assert not made.lost(crew.workers[2], loss(2))  # nobody would be left, and the budget is spent
    roomy = make(Crew(), budget=9)
    roomy.away = {1}
    assert not roomy.lost(Worker(2), loss(2))


def test_a_run_that_has_lost_another_worker_does_not_continue():
    crew = Crew()
    made = make(crew)
    assert made.lost(crew.workers[1], loss(1))
    assert made.goes_on_without(loss(1))
    assert not made.goes_on_without(loss(2))
    crew.broken = loss(0)  # of the actor: a call that was sent again would fail at once, for ever
    assert not made.goes_on_without(loss(0))
    assert not made.goes_on_without(loss(1))


def test_one_that_cannot_be_replaced_is_told_and_the_others_go_on(caplog):
    crew = Crew(ConfigError("no room"))
    made = make(crew)
    assert made.lost(crew.workers[1], loss(1))
    until(lambda: "cannot be replaced: no room" in caplog.text)
    assert not made.join()
    assert made.present == [2]
    assert crew.workers[1].killed


def test_one_that_is_lost_again_before_it_takes_part_does_not_join():
    crew = Crew()
    made = make(crew, budget=2)
    assert made.lost(crew.workers[1], loss(1))
    until(lambda: made._ready == [1])
    crew.may_answer.clear()
    assert made.lost(crew.workers[1], loss(1))
    assert not made.join()
    assert made.present == [2]
    crew.may_answer.set()
    until(lambda: made._ready == [1])
    assert made.join()
    assert [order[1]["number"] for order in crew.orders] == [1, 2]
