"""Real processes, and every way in which a function can break them."""

import itertools
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine_core.errors import DataError, PluginError, TrainingFailed
from engine_core.rewards.preflight import MOST_WORKERS
from engine_core.rewards.signatures import RewardFunction
from engine_core.runs import machine
from engine_plugin_processes.json_channel import LENGTH
from engine_plugin_rewards.worker_pool import RewardWorkers, pool
from engine_plugin_rewards.worker_pool.pool import SAMPLES_PER_REQUEST, Worker, _bounds

SHORT = {"timeout_seconds": 1.0, "max_failure_share": 1.0}


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def values(scored, name="misbehave"):
    return [rollout.rewards[name] for rollout in scored]


@pytest.mark.parametrize("hang", ["sleep", "power", "regex"])
def test_a_hanging_sample_is_killed_and_the_others_are_scored(runner, rollouts, hang, caplog):
    scored = rollouts("a", hang, "bbb", "cc")
    began = time.monotonic()
    metrics = runner("misbehave", **SHORT).score(scored, 1)
    assert time.monotonic() - began < 10
    assert values(scored) == [1.0, None, 3.0, 2.0]
    assert [r.valid for r in scored] == [True, False, True, True]
    assert metrics["reward/misbehave/timeouts"] == metrics["reward/timeouts"] == 1
    assert metrics["reward/misbehave/errors"] == 0
    assert metrics["reward/misbehave/restarts"] == 1
    assert "no answer after 1 s" in caplog.text
    assert "in misbehave" in caplog.text  # where it hung


def test_a_hanging_sample_whose_watchdog_crashes_is_a_timeout_and_a_crash_of_the_function_is_none(
    runner, rollouts
):
    metrics = runner("misbehave", timeout_seconds=5.0, max_failure_share=1.0).score(
        rollouts("a", "watchdog", "bb", "segfault"), 1
    )
    assert metrics["reward/misbehave/timeouts"] == 1
    assert metrics["reward/misbehave/errors"] == 1


def test_two_hanging_samples_of_a_function_in_plural_form_are_found(runner, rollouts):
    scored = rollouts("a", "sleep", "bbb", "power", "cc", "d")
    metrics = runner("misbehave_in_lists", **SHORT, workers=2).score(scored, 1)
    assert values(scored, "misbehave_in_lists") == [1.0, None, 3.0, None, 2.0, 1.0]
    assert metrics["reward/timeouts"] == 2


@pytest.mark.parametrize(
    ("what", "told", "restarts"),
    [
        ("raise", "ValueError: this one", False),
        ("exit", "its worker exited with status 3", True),
        ("_exit", "its worker exited with status 4", True),
        ("segfault", "its worker was killed by SIGSEGV", True),
        ("allocate", "MemoryError", True),
        ("input", "EOFError", False),
        ("nan", "must give a finite number for each sample, got nan", False),
    ],
)
def test_a_failing_sample_is_told_and_the_others_are_scored(survivor, rollouts, what, told, restarts, caplog):
    runner, name = survivor
    scored = rollouts("a", "bb", what, "ccc")
    runner.scorers[0].logged.clear()
    metrics = runner.score(scored, 3)
    assert values(scored, name) == [1.0, 2.0, None, 3.0]
    assert [r.valid for r in scored] == [True, True, False, True]
    assert metrics["reward/failures"] == metrics[f"reward/{name}/errors"] == 1
    assert (metrics[f"reward/{name}/restarts"] > 0) is restarts
    assert told in caplog.text
    assert "train:2" in caplog.text


def test_a_worker_that_kept_memory_until_none_was_left_is_replaced(runner, rollouts):
    one = runner("misbehave", max_memory_gb=4, workers=1, max_failure_share=1.0)
    metrics = one.score(rollouts(*["keep"] * 4, "allocate", "a"), 1)
    assert metrics["reward/misbehave/restarts"] == 1
    scored = rollouts("keep", "keep")
    metrics = one.score(scored, 2)
    assert values(scored) == [4.0, 4.0]
    assert metrics["reward/failures"] == metrics["reward/misbehave/restarts"] == 0


@pytest.mark.parametrize("what", ["print", "fork"])
def test_printing_and_forking_hurt_nobody(survivor, rollouts, what, capfd):
    runner, name = survivor
    scored = rollouts("a", what, "bb")
    metrics = runner.score(scored, 1)
    assert values(scored, name) == [1.0, float(len(what)), 2.0]
    assert metrics["reward/failures"] == metrics[f"reward/{name}/restarts"] == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("text", "seconds"), [("spawn", "61"), ("session", "62")])
def test_what_a_killed_worker_started_is_killed_too(runner, rollouts, text, seconds):
    runner("misbehave", **SHORT).score(rollouts(text), 1)
    end = time.monotonic() + 30  # a process that was killed ends when it has a turn
    while ["sleep", seconds] in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_closing_leaves_no_process(runner, rollouts):
    before = children()
    one = runner("letters", workers=2)
    assert len(children() - before) == 2
    one.close()
    assert children() <= before


@pytest.mark.parametrize("text", ["a", "sleep"])
def test_a_worker_ends_when_its_controller_was_killed(tmp_path, text):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import rollouts_of, runner_of
runner = runner_of("misbehave", timeout_seconds=3.0)
print(runner.pools[0].workers[0].popen.pid, flush=True)
while True:
    runner.score(rollouts_of({text!r}), 1)
"""
    (tmp_path / "controller.py").write_text(code)
    controller = subprocess.Popen([sys.executable, str(tmp_path / "controller.py")], stdout=subprocess.PIPE)
    worker = psutil.Process(int(controller.stdout.readline()))
    time.sleep(0.5)
    controller.kill()
    controller.communicate()
    deadline = time.monotonic() + 60
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_changed_arguments_do_not_reach_the_rollouts(runner, rollouts):
    tag = {"seen": False}
    scored = rollouts("a", "b", answer=["x", "y"], tags=[tag, tag])
    metrics = runner("mutate").score(scored, 1)
    assert metrics["reward/failures"] == 0
    assert [(r.text, r.prompt.columns["answer"]) for r in scored] == [("a", "x"), ("b", "y")]
    assert tag == {"seen": False}


@pytest.mark.usefixtures("fresh_children")  # whose end this process sees
def test_a_worker_that_died_between_two_steps_is_replaced_without_blame(runner, rollouts):
    one = runner("where")
    first, second = rollouts("a"), rollouts("a")
    one.score(first, 1)
    worker = psutil.Process(int(first[0].rewards["where"]))
    worker.kill()
    while worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    metrics = one.score(second, 2)
    assert metrics["reward/failures"] == 0
    assert metrics["reward/where/restarts"] == 1
    assert second[0].rewards["where"] != first[0].rewards["where"]


def test_samples_spread_over_workers_and_keep_their_order(runner, rollouts):
    texts = ["x" * (i % 17) for i in range(200)]
    one, two = rollouts(*texts), rollouts(*texts)
    runner("letters", "where", workers=1).score(one, 1)
    runner("letters", "where", workers=2).score(two, 1)
    assert values(one, "letters") == values(two, "letters") == [float(len(t)) for t in texts]
    assert len(set(values(two, "where"))) == 2


def test_a_worker_has_one_request_of_few_samples_and_the_rest_waits_as_positions(runner, rollouts):
    one = runner("letters", workers=2)
    (workers,) = one.pools
    sizes, given = [], workers._give

    def give(worker, job):
        assert worker.job is None
        assert sum(len(each.job or ()) for each in workers.workers) + len(job) <= 2 * SAMPLES_PER_REQUEST
        sizes.append(len(job))
        given(worker, job)

    workers._give = give
    scored = rollouts(*["a"] * 1000)
    one.score(scored, 1)
    assert sum(sizes) == 1000
    assert max(sizes) <= SAMPLES_PER_REQUEST
    assert not workers.queue
    with pytest.raises(IndexError):  # more than were announced
        workers.submit(range(1000, 1001), {"completion": ["a"]})


@pytest.mark.parametrize(("cores", "size"), [(1, 1), (3, 3), (200, MOST_WORKERS)])
def test_a_reward_that_says_so_has_a_worker_for_each_core(runner, monkeypatch, cores, size):
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(RewardWorkers, "start", lambda self, pools: None)
    assert [pool.size for pool in runner("letters", "busy").pools] == [1, size]
    assert [pool.size for pool in runner("letters", "busy", workers=2).pools] == [2, 2]


def test_asynchronous_samples_wait_together_and_fail_alone(runner, rollouts, caplog):
    scored = rollouts(*["a"] * 60, "sleep", "raise")
    began = time.monotonic()
    metrics = runner("late", timeout_seconds=1.0).score(scored, 1)
    assert time.monotonic() - began < 12  # 60 times 0.2 s one after another would be more
    assert values(scored, "late") == [*[1.0] * 60, None, None]
    assert (metrics["reward/late/timeouts"], metrics["reward/late/errors"]) == (1, 1)
    assert metrics["reward/late/restarts"] == 0


def test_an_asynchronous_sample_that_holds_the_event_loop_is_found(runner, rollouts):
    scored = rollouts("a", "hang", "bb")
    metrics = runner("late", timeout_seconds=0.7).score(scored, 1)
    assert values(scored, "late") == [1.0, None, 2.0]
    assert metrics["reward/late/timeouts"] == 1


def test_a_list_of_one_number_is_refused_not_broadcast(runner, rollouts):
    with pytest.raises(
        TrainingFailed, match=r"must return a list of 4 numbers, one for each sample, got a list of length 1"
    ):
        runner("one_number").score(rollouts("a", "b", "c", "d"), 1)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("count", [2, 3, 5, 33, 63, 65, 255])
def test_no_request_of_one_sample_hides_a_function_that_returns_one_number(count, workers):
    signature = RewardFunction("r", lambda completions: 0, {}).signature
    bounds = _bounds(signature, count, workers)
    assert (bounds[0], bounds[-1]) == (0, count)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert 2 <= min(sizes) <= max(sizes) <= SAMPLES_PER_REQUEST


def test_a_function_that_names_group_ids_gets_all_samples_at_once(runner, rollouts):
    scored = rollouts("a", "bb", "c", "c", *["d", "eee"] * 40)
    runner("best_of_group", workers=2).score(scored, 1)
    assert values(scored, "best_of_group") == [0.0, 1.0, 1.0, 1.0, *[0.0, 1.0] * 40]


def test_a_step_ends_as_soon_as_too_many_failed_and_the_runner_can_go_on(runner, rollouts):
    one = runner("misbehave", timeout_seconds=0.5, max_failure_share=0.2)
    began = time.monotonic()
    with pytest.raises(TrainingFailed) as error:
        one.score(rollouts(*["sleep"] * 10), 7)
    assert time.monotonic() - began < 8  # 3 of 10 were waited for
    assert str(error.value).startswith(
        "Reward 'misbehave' failed on at least 3 of the 10 samples of step 7, more than max_failure_share = 0.2 allows. "
        "First: sample train:0 (1:0:0): no answer after 0.5 s"
    )
    scored = rollouts("a", "bb")
    one.score(scored, 8)
    assert values(scored) == [1.0, 2.0]


def test_a_reward_that_does_not_fit_its_options_ends_the_start_and_leaves_no_process(runner):
    before = children()
    with pytest.raises(Exception, match="declares the option 'tolerance' but has no such argument") as error:
        runner("letters", "wrong_option")
    assert error.value.exit_code == 2
    assert children() <= before


def test_a_factory_that_fails_is_told_with_its_line_and_tried_once(runner, caplog):
    with pytest.raises(
        PluginError,
        match=r"reward 'no_file' failed: FileNotFoundError: .*absent.json.*bad_rewards.py:\d+: return",
    ):
        runner("no_file")
    assert "Started again" not in caplog.text


def test_a_worker_that_cannot_start_is_told_with_its_last_output(runner, monkeypatch):
    monkeypatch.setattr("engine_plugin_processes.child.sys.executable", str(Path("/bin/false")))
    with pytest.raises(PluginError, match="Reward 'letters' does not start: its worker exited with status 1"):
        runner("letters")


@pytest.fixture
def killing(monkeypatch):
    """Return ``killing(n)``, which kills the next ``n`` workers as soon as they are started."""

    def kill(count):
        left = itertools.count(count, -1)

        class Killed(Worker):
            def __init__(self, *args):
                super().__init__(*args)
                if next(left) > 0:
                    self.popen.kill()

        monkeypatch.setattr(pool, "Worker", Killed)

    return kill


def test_a_worker_that_is_killed_while_it_starts_is_started_again(runner, rollouts, killing, caplog):
    killing(pool.START_ATTEMPTS - 1)
    one = runner("letters")
    assert caplog.text.count("while it started. Started again.") == pool.START_ATTEMPTS - 1
    assert one.score(rollouts("ab"), 1)["reward/letters/restarts"] == pool.START_ATTEMPTS - 1
    killing(pool.START_ATTEMPTS)
    with pytest.raises(
        PluginError, match="Reward 'letters' does not start: its worker was killed by SIGKILL"
    ):
        runner("letters")


def test_a_worker_that_takes_a_place_is_started_again_however_it_ended(runner, rollouts, monkeypatch):
    one = runner("letters")
    commands = iter([["/bin/false"]] * (pool.START_ATTEMPTS - 1))
    command = pool.python_command
    monkeypatch.setattr(pool, "python_command", lambda entry: next(commands, None) or command(entry))
    one.pools[0].workers[0].kill()
    scored = rollouts("ab")
    metrics = one.score(scored, 1)
    assert values(scored, "letters") == [2.0]
    assert metrics["reward/letters/restarts"] == pool.START_ATTEMPTS


def test_data_that_cannot_be_sent_is_named(runner, rollouts):
    with pytest.raises(DataError, match=r"cannot be sent to its worker: .*complex.*workers = 0"):
        runner("exact").score(rollouts("a", answer=[1j]), 1)


def test_workers_import_nothing_heavy(runner, rollouts):
    scored = rollouts("a")
    runner("imported").score(scored, 1)
    assert scored[0].rewards["imported"] == 0.0


def test_options_reach_functions_and_factories(runner, rollouts):
    scored = rollouts("abc")
    runner("scaled", "made").score(scored, 1)
    assert scored[0].rewards == {"scaled": 6.0, "made": 6.0}


NO_REPLIES = (
    b"[]",
    b"{}",
    b'{"refused": 1, "message": "x"}',
    b'{"ready": []}',
    b'{"at": "0", "outcome": {}}',
    b'{"at": 0, "outcome": {"value": "1", "failure": "", "message": "", "trace": "", "contract": false, "answer": null}}',
)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (LENGTH.pack(2**24 + 1), "a message of 16777217 bytes"),  # refused before memory is taken for it
        (LENGTH.pack(200_000) + b"[" * 200_000, "nested too deeply"),
        *((LENGTH.pack(len(each)) + each, "no reply") for each in NO_REPLIES),
    ],
)
def test_what_is_no_reply_is_the_end_of_a_worker(sent, why):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=theirs.sendall, args=(sent,), daemon=True).start()
        with pytest.raises(ValueError, match=why):
            pool.ReplyChannel(ours).receive()
