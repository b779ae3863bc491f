"""A group of workers answers, also when what it runs dies, hangs or talks too much."""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest

from engine_plugin_testing import forking, launcher
from engine_plugin_testing.launcher import CaseFailed, Workers

HERE = Path(__file__).parent
FILE = "launcher_cases.py"


@pytest.fixture(params=["fresh", "forked"])
def start(request, monkeypatch):
    """How workers are started."""
    if request.param == "forked":
        monkeypatch.setenv(forking.VARIABLE, "1")
        if not forking.wanted():
            pytest.skip("workers are forked on Linux alone")
    else:
        monkeypatch.delenv(forking.VARIABLE, raising=False)
    return request.param


@pytest.fixture
def group(start):
    """``group(world_size=2, ...)``; closed after the test, with nothing left of it."""
    made = []

    def make(**arguments):
        made.append(Workers(root=HERE, **arguments))
        return made[-1]

    yield make
    for workers in made:
        processes = [rank.popen for rank in workers.ranks]
        workers.close()
        assert all(process.poll() is not None for process in processes)
        assert not workers.folder.exists()


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))  # the workers get this process's path


def run(workers, case, **settings):
    workers.run("launcher_cases:Bench", f"launcher_cases:{case}", settings)


def pids(workers):
    return [rank.popen.pid for rank in workers.ranks]


def test_many_cases_run_in_one_process(group):
    workers = group()
    run(workers, "holds")
    first = pids(workers)
    with pytest.raises(CaseFailed, match=r"^The answer is 41; expected 42\.\n\n.*launcher_cases.py"):
        run(workers, "fails", answer=41)
    run(workers, "fails", answer=42)
    assert pids(workers) == first
    assert first[0] != os.getpid()


def test_a_promise_that_is_broken_and_a_crash_are_told_apart(group):
    workers = group()
    with pytest.raises(CaseFailed) as broken:
        run(workers, "fails", answer=41)
    with pytest.raises(CaseFailed, match=r"^ValueError: not an answer") as crashed:
        run(workers, "crashes")
    with pytest.raises(CaseFailed) as dead:
        run(workers, "dies")
    assert [caught.value.crashed for caught in (broken, crashed, dead)] == [False, True, True]


def test_what_a_case_prints_is_no_answer(group):
    workers = group()
    run(workers, "prints")
    run(workers, "holds")


def test_a_worker_that_dies_fails_its_case_with_its_last_lines_and_the_next_case_has_a_new_one(group):
    workers = group()
    with pytest.raises(CaseFailed, match=r"Worker 0 exited with status 7\. Its last lines:\nlast words"):
        run(workers, "dies")
    run(workers, "holds")


def test_a_case_past_its_deadline_is_killed_and_shows_where_it_was(group):
    workers = group(deadline=1.0)
    run(workers, "holds")
    with pytest.raises(CaseFailed, match=r"(?s)Worker 0 does not answer.*launcher_cases.py.* in hangs"):
        run(workers, "hangs")
    run(workers, "holds")


def test_workers_that_are_lost_again_and_again_are_not_started_for_ever(group):
    workers = group()
    for _ in range(launcher.MOST_LOSSES):
        with pytest.raises(CaseFailed, match="exited with status 7"):
            run(workers, "dies")
    with pytest.raises(CaseFailed, match="were lost 4 times; they are not started again"):
        run(workers, "holds")


def test_each_worker_enters_the_context_once(group):
    workers = group(context="launcher_cases:context")
    for _ in range(2):
        run(workers, "in_the_context", module="launcher_cases")


def test_a_context_may_be_in_a_file_beside_the_test(group):
    run(group(context=f"{FILE}:context"), "holds")


def test_workers_whose_context_fails_say_why_at_once_and_for_each_case(group):
    workers = group(context="launcher_cases:broken_context")
    for _ in range(2):
        with pytest.raises(CaseFailed, match=r"(?s)The workers do not start.*no device for this rank"):
            run(workers, "holds")
    assert workers.starts == 1


def test_ranks_talk_to_each_other_and_a_rank_that_waits_in_vain_does_not_hold_up_the_suite(
    group, monkeypatch
):
    monkeypatch.setattr(launcher, "STRAGGLER_SECONDS", 1.0)
    workers = group(world_size=2)
    run(workers, "sums_over_ranks")
    with pytest.raises(
        CaseFailed, match=r"(?s)^rank 0: rank 0 is wrong.*Worker 1 does not answer.*all_reduce"
    ):
        run(workers, "first_rank_fails_before_a_collective")
    run(workers, "sums_over_ranks")


def test_a_fork_has_imported_what_takes_long_and_has_the_environment_and_folder_of_its_start(
    group, start, monkeypatch, tmp_path
):
    monkeypatch.setenv("OF_THIS_TEST", start)
    monkeypatch.chdir(tmp_path)
    seen = {"OF_THIS_TEST": start, "OMP_NUM_THREADS": "1"}
    run(group(), "is_as_told", imported=start == "forked", environment=seen, folder=str(tmp_path))


def test_a_worker_with_an_environment_of_its_own_is_a_fresh_interpreter(group):
    run(group(env={"A": "1"}), "is_as_told", imported=False, environment={"A": "1"}, folder=os.getcwd())


def test_a_worker_leads_a_process_group_and_ends_when_nobody_has_anything_for_it(group):
    workers = group()
    run(workers, "holds")
    (rank,) = workers.ranks
    assert os.getpgid(rank.popen.pid) == rank.popen.pid
    rank.requests.close()
    assert rank.popen.wait(30) == 0


@pytest.mark.parametrize("start", ["forked"], indirect=True)
def test_where_what_forks_is_gone_another_begins(group):
    first, second = group(), group()
    run(first, "holds")
    parent = psutil.Process(pids(first)[0]).parent()
    parent.kill()
    deadline = time.monotonic() + 30
    while parent.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:  # who began it buries it
        time.sleep(0.01)
    run(second, "holds")
    assert psutil.Process(pids(second)[0]).ppid() != parent.pid


PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
from engine_plugin_testing.launcher import Workers
"""


def test_a_worker_computes_in_one_thread_where_nobody_has_said_how_many(start):
    code = PROGRAM + 'Workers().run("launcher_cases:Bench", "launcher_cases:computes_in_one_thread", {})'
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_groups_that_are_closed_leave_no_descriptor_behind(group):
    def descriptors():
        workers = group()
        run(workers, "holds")
        workers.close()
        return len(os.listdir("/proc/self/fd"))

    first = descriptors()
    assert descriptors() == first


def test_a_signal_to_a_fork_that_ended_just_now_goes_nowhere():
    """Between the end of a process and the news of it."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    process = types.SimpleNamespace(pid=ended.pid, exitcode=None)
    replies, requests = os.pipe()
    worker = forking.Forked(process, requests, replies)
    worker.send_signal(signal.SIGKILL)
    worker.stdin.close()
    worker.stdout.close()


def test_a_process_that_ends_without_closing_its_workers_waits_for_none_of_them(start):
    """As one that is interrupted: here the worker would be busy for ten minutes."""
    code = (
        PROGRAM
        + """
import threading
workers = Workers()
workers.run("launcher_cases:Bench", "launcher_cases:holds", {})
hangs = ("launcher_cases:Bench", "launcher_cases:hangs", {})
threading.Thread(target=workers.run, args=hangs, daemon=True).start()
print(workers.ranks[0].popen.pid, flush=True)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    worker = int(done.stdout)
    deadline = time.monotonic() + 30
    while start == "forked" and psutil.pid_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    if start == "forked":
        assert not psutil.pid_exists(worker)
    else:  # it is asked nothing more: it ends after its case
        os.kill(worker, signal.SIGKILL)
