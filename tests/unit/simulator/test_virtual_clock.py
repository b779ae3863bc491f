"""Threads in virtual time: waiting takes no real time, and a deadlock is reported."""

import threading
import time

import pytest
from virtual_cluster.virtual_clock import StandsStill, VirtualClock


def test_hours_pass_at_once_and_threads_meet_in_the_order_of_time():
    clock, seen = VirtualClock(), []

    def work(name, seconds):
        for _ in range(2):
            clock.sleep(seconds)
            seen.append((name, clock.now()))

    threads = [clock.thread(lambda n=n, s=s: work(n, s), n) for n, s in (("a", 3600.0), ("b", 2500.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [("b", 2500.0), ("a", 3600.0), ("b", 5000.0), ("a", 7200.0)]


def test_a_condition_is_notified_or_late():
    clock = VirtualClock()
    changed, ready = clock.condition(), []

    def work():
        clock.sleep(5.0)
        with changed:
            ready.append(True)
            changed.notify_all()

    thread = clock.thread(work, "worker")
    thread.start()
    with changed:
        assert not changed.wait(2.0)
        assert clock.now() == 2.0
        assert changed.wait_for(lambda: ready, 10.0)
        assert clock.now() == 5.0
        assert changed.wait_for(lambda: False, 1.5) is False
    assert clock.now() == 6.5
    thread.join()


def test_a_lock_is_held_while_its_holder_sleeps():
    clock = VirtualClock()
    lock, seen = clock.condition(), []

    def work():
        with lock:
            clock.sleep(4.0)
            seen.append("worker")

    thread = clock.thread(work, "worker")
    thread.start()
    clock.sleep(1.0)
    with lock:
        seen.append("main")
    assert (seen, clock.now()) == (["worker", "main"], 4.0)
    thread.join()


@pytest.mark.parametrize("last", ["main", "worker"])
def test_a_deadlock_is_an_error_and_no_hang(last):
    clock = VirtualClock()
    never = clock.condition()

    def work():
        if last == "worker":
            clock.sleep(1.0)

    thread = clock.thread(work, "worker")
    thread.start()
    with pytest.raises(StandsStill, match="every thread waits"), never:
        never.wait()


def test_only_the_controllers_own_work_is_counted():
    clock = VirtualClock()

    def burn(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    clock.controller.switch(True)
    burn(0.02)
    with clock.aside():
        burn(0.05)
    thread = clock.thread(lambda: burn(0.02), "worker")
    thread.start()
    thread.join()
    clock.controller.switch(False)
    burn(0.05)
    assert 0.04 <= clock.controller.seconds < 0.09
    assert threading.active_count() >= 1
