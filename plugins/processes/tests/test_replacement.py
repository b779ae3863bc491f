"""Who of a sampler's processes is there, and how many may be lost."""

import threading

from engine_core.errors import ConfigError, WorkerLost
from engine_plugin_processes.replacement import Replacements, Withdrawn


class Worker:
    def __init__(self, rank):
        self.rank, self.roles, self.host, self.killed, self.asked = rank, ("rollout",), "here", False, False

    def ask_to_end(self):
        self.asked = True

    def ended(self, seconds):
        return True

    def kill(self):
        self.killed = True


class Crew:
    """Takes new workers in, and says that they have started."""

    def __init__(self, error=None):
        self.workers = {rank: Worker(rank) for rank in (1, 2)}
        self.orders, self.error, self.done, self.dismissed = [], error, threading.Event(), []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def admit(self, worker):
        self.workers[worker.rank] = worker

    def dismiss(self, worker, cause):
        self.dismissed.append(worker)
        self.may_answer.set()

    def next_number(self):
        return 5

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
    def begin(rank, number, wanted):
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
    assert crew.orders == [{1: {"number": 1, "id": 5}}]
    assert made.metrics() == {
        "sampling/lost": 1.0, "sampling/joined": 1.0, "sampling/left": 0.0, "sampling/reissued": 0.0, "sampling/samplers": 2.0
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


def test_one_that_cannot_be_replaced_is_told_and_the_others_go_on(caplog):
    crew = Crew(ConfigError("no room"))
    made = make(crew)
    assert made.lost(crew.workers[1], loss(1))
    until(lambda: "cannot be replaced (no room)" in caplog.text)
    assert not made.join()
    assert made.present == [2]
    assert crew.workers[1].killed


def growing(crew, most=4, budget=0, begin=None, ended=None):
    """Ranks 1 to ``most``, of which those of the crew are there."""

    def start(rank, number, wanted):
        return Worker(rank), {"number": number}

    return Replacements(
        crew, range(1, most + 1), budget, "runtime.x.max_replacements", begin or start, 1.0, list(crew.workers),
        ended or (lambda rank: None), changeable=True,
    )  # fmt: skip


def test_more_are_begun_at_once_and_take_part_from_a_change_on():
    crew = Crew()
    made = growing(crew)
    assert (made.present, made.metrics()["sampling/samplers"]) == ([1, 2], 2.0)
    made.want(4)
    until(lambda: sorted(made._ready) == [3, 4])
    assert made.present == [1, 2]
    assert made.change()
    assert made.present == [1, 2, 3, 4]
    assert not made.change()
    told = made.metrics()
    assert (told["sampling/joined"], told["sampling/samplers"], told["sampling/lost"]) == (2.0, 4.0, 0.0)


def test_the_last_ones_leave_at_a_change_and_nothing_is_left_of_them():
    crew, gone = Crew(), []
    made = growing(crew, ended=gone.append)
    first, second = crew.workers[1], crew.workers[2]
    made.want(1)
    assert made.present == [1, 2]
    assert not made.change()
    assert made.present == [1]
    until(lambda: gone == [2])
    assert crew.dismissed == [second]
    assert second.asked
    assert second.killed
    assert not first.killed
    told = made.metrics()
    assert (told["sampling/left"], told["sampling/samplers"], told["sampling/lost"]) == (1.0, 1.0, 0.0)
    assert made.losses == {1: 0, 2: 1, 3: 0, 4: 0}  # what it had is for others
    made.want(2)
    until(lambda: made._ready == [2])
    assert made.change()
    assert crew.workers[2] is not second


def test_one_that_is_withdrawn_while_it_starts_does_not_come():
    crew, gone = Crew(), []
    crew.may_answer.clear()
    made = growing(crew, ended=gone.append)
    made.want(3)
    until(crew.done.is_set)  # it builds its engine
    made.want(2)
    until(lambda: gone == [3])
    assert crew.workers[3].killed
    assert not made.change()
    assert made.present == [1, 2]
    assert made.metrics()["sampling/left"] == 0.0


def test_one_that_could_sample_and_is_not_wanted_any_more_ends_without_a_sample():
    crew, gone = Crew(), []
    made = growing(crew, ended=gone.append)
    made.want(3)
    until(lambda: made._ready == [3])
    made.want(2)
    until(lambda: gone == [3])
    assert not made.change()
    assert made.present == [1, 2]


def test_what_waits_for_room_ends_when_it_is_not_wanted_and_when_the_run_ends():
    waiting, crew = [], Crew()

    def begin(rank, number, wanted):
        waiting.append(rank)
        while wanted():
            threading.Event().wait(0.005)
        raise Withdrawn

    made = growing(crew, begin=begin)
    made.want(4)
    until(lambda: sorted(waiting) == [3, 4])
    made.want(3)
    until(lambda: list(made._coming) == [3])
    assert not made.change()
    assert made.present == [1, 2]
    made.close()
    made.settle()
    assert not made._coming
    assert not [thread for thread in made._threads.values() if thread.is_alive()]


def test_one_that_is_lost_beyond_the_budget_is_gone_until_it_is_asked_for():
    crew = Crew()
    made = growing(crew, budget=1)
    made.want(3)
    until(lambda: made._ready == [3])
    made.change()
    assert made.lost(crew.workers[3], loss(3))  # replaced: it is in the budget
    until(lambda: made._ready == [3])
    made.change()
    assert made.lost(crew.workers[3], loss(3))
    assert (made.wanted, made.present) == (2, [1, 2])
    made.change()
    assert not made._coming
    made.want(3)
    until(lambda: made._ready == [3])
    assert made.change()
    assert made.present == [1, 2, 3]
    assert made.metrics()["sampling/lost"] == 2.0
    made.away = {2, 3, 4}
    assert not made.lost(crew.workers[1], loss(1))  # nobody would be left


def test_one_that_is_lost_before_it_takes_part_does_not():
    crew = Crew()
    made = growing(crew)
    made.want(3)
    until(lambda: made._ready == [3])
    assert made.lost(crew.workers[3], loss(3))
    assert not made.change()
    assert made.present == [1, 2]


def test_one_that_cannot_be_begun_is_told_and_not_tried_at_every_update(caplog):
    tried, crew = [], Crew()

    def begin(rank, number, wanted):
        tried.append(rank)
        raise ConfigError("no such model")

    made = growing(crew, begin=begin)
    made.want(3)
    until(lambda: "rollout[3] cannot be begun (no such model)" in caplog.text)
    until(lambda: not made._coming)
    made.change()
    made.change()
    assert (tried, made.wanted, made.present) == ([3], 2, [1, 2])
    made.want(3)
    until(lambda: tried == [3, 3])


def test_one_that_is_lost_while_it_leaves_has_left():
    crew = Crew()
    made = growing(crew)
    send = crew.send

    def lose(messages, *arguments, **settings):
        (rank,) = messages
        assert made.lost(crew.workers[rank], loss(rank))
        crew.error = loss(rank)
        return send(messages, *arguments, **settings)

    crew.send = lose
    made.want(1)
    made.change()
    assert made.present == [1]
    told = made.metrics()
    assert (told["sampling/left"], told["sampling/lost"]) == (1.0, 0.0)
