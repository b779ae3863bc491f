"""A rollout engine in a process of its own, with a real process: answers, losses, weights, refusals, ends."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import (
    ConfigError,
    DataError,
    EnvironmentProblem,
    PluginError,
    SamplerLost,
    TrainingFailed,
)
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes import foreign_interpreter
from engine_plugin_processes.sampler_process.engine import SamplerEngine
from engine_plugin_processes.transports import bucketing

pytestmark = pytest.mark.usefixtures("forked_workers")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def plugins():
    return PluginSet.load({"rollout_engines": {"counting"}}, ["counting_plugin.py"], HERE)


@pytest.fixture
def make(plugins, tmp_path):
    """``make(source=..., ranks=1, max_restarts=1, table={...})``: an engine, ended after the test."""
    made = []

    def build(source=None, table=(), ranks=1, **process):
        table = {"starts": str(tmp_path / "starts"), **dict(table)}
        options = plugins.spec("rollout_engines", "counting").config(**table)
        config = RolloutConfig(backend="counting", options=options, process=ProcessConfig(**process))
        context = WorkerContext(plugins=plugins, role="rollout", device=torch.device("cpu"), world_size=ranks)
        made.append(SamplerEngine(config, ModelConfig(), context, source))
        return made[-1].build(config)

    yield build
    for engine in made:
        engine.close()


def test_a_table_that_was_planned_after_the_start_is_the_one_that_engines_are_built_by(plugins):
    table = plugins.spec("rollout_engines", "counting").config
    config = RolloutConfig(backend="counting", options=table(length=2), process=ProcessConfig())
    context = WorkerContext(plugins=plugins, role="rollout", device=torch.device("cpu"), world_size=1)
    engine = SamplerEngine(config, ModelConfig(), context)
    try:
        engine.build(config.model_copy(update={"options": table(length=3)}))
        (rollout,) = engine.generate(requests(1))
        assert rollout.response_length == 3
    finally:
        engine.close()


def requests(count, start=0, **columns):
    """Of which the second does what ``columns`` say."""
    return [
        Request(
            f"r{i}", Prompt(f"train:{i}", [3, 4], "", columns if i == start + 1 else {}), Sampling(), i, 0
        )
        for i in range(start, start + count)
    ]


def weights(value):
    return iter([("a", torch.full((2,), float(value))), ("b", torch.full((3,), float(value)))])


def of_version(rollouts, version):
    for rollout in rollouts:
        assert rollout.policy_versions.tolist() == [version] * 4
        assert rollout.rollout_log_probs.tolist() == [0.0, 0.0, -version, -version]


def starts(tmp_path):
    return [int(line) for line in (tmp_path / "starts").read_text().splitlines()]


def gone(pid):
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} lives"
        time.sleep(0.05)


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_that_is_killed_is_started_again_and_every_request_is_answered_once(
    make, tmp_path, kept, caplog
):
    caplog.set_level(logging.WARNING, "engine")
    engine = make(source=None if kept else lambda: weights(5))
    assert engine.update_weights(weights(5), 5) == engine.update_weights(weights(5), 5)
    asked = requests(6, do="kill", flag=str(tmp_path / "flag"))
    counted = Counter()
    original, engine.step = engine.step, lambda: [counted.update([r.request_id]) or r for r in original()]
    rollouts = engine.generate(asked)
    assert counted == Counter(r.id for r in asked)  # audit by id
    assert [r.request_id for r in rollouts] == [r.id for r in asked]
    assert all(rollout.prompt is request.prompt for rollout, request in zip(rollouts, asked, strict=True))
    of_version(rollouts, 5)
    first, second = starts(tmp_path)
    pids = [int(rollout.extras["pid"][0]) for rollout in rollouts]
    assert pids == [first] + [second] * 5  # what was finished is not sampled again
    assert "killed by SIGKILL" in caplog.text
    assert "it will kill" in caplog.text  # its last lines
    assert (
        "It is started again (1 of 3, rollout.process.max_restarts), and its unfinished requests"
        in caplog.text
    )


def test_a_loss_while_idle_and_one_in_an_update_end_in_the_new_weights(make, tmp_path, monkeypatch):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)  # a bucket for each tensor
    engine = make()
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    engine.update_weights(weights(1), 1)
    of_version(engine.generate(requests(2)), 1)

    def dies_half_way():
        stream = weights(2)
        yield next(stream)
        os.kill(starts(tmp_path)[-1], signal.SIGKILL)
        gone(starts(tmp_path)[-1])
        yield from stream
        read.append("all")  # ranks of an actor would wait for one that does not read on

    read = []

    engine.update_weights(dies_half_way(), 2)
    assert read == ["all"]
    of_version(engine.generate(requests(2)), 2)
    assert len(starts(tmp_path)) == 3
    assert [name for name, _ in engine._weights._kept] == ["a", "b"]


def test_a_stream_that_fails_as_a_training_step_does_is_told_at_once_in_its_own_words(make, monkeypatch):
    engine = make()
    engine.update_weights(weights(1), 1)

    def breaks():
        yield from list(weights(2))[:1]
        raise TrainingFailed("a rank of the actor is lost")

    monkeypatch.setattr(
        engine.replacements, "lost_one_of", lambda *arguments: pytest.fail("no process was lost")
    )
    with pytest.raises(TrainingFailed, match=r"^a rank of the actor is lost$"):
        engine.update_weights(breaks(), 2)
    with pytest.raises(DataError, match=r"weights of two versions \(an update to version 2"):
        engine.generate(requests(1))
    engine.update_weights(weights(3), 3)
    of_version(engine.generate(requests(1)), 3)


def test_a_new_process_that_was_not_given_its_weights_to_the_end_is_not_sampled_from(
    make, tmp_path, monkeypatch
):
    class Stop(BaseException):
        pass

    def stopped(*arguments):
        raise Stop

    engine = make()
    engine.update_weights(weights(1), 1)
    monkeypatch.setattr(engine._weights, "_send", stopped)
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    with pytest.raises(Stop):
        engine.generate(requests(1))
    monkeypatch.undo()
    with pytest.raises(DataError, match="version 1 did not reach a process that was started again"):
        engine.generate(requests(1))
    engine.update_weights(weights(2), 2)
    of_version(engine.generate(requests(1)), 2)


def test_a_new_process_that_dies_while_it_receives_weights_is_replaced_too(make, tmp_path):
    streamed = []

    def source():
        streamed.append(1)
        first, second = weights(5)
        yield first
        if len(streamed) == 1:  # the process that was started last receives them for the first time
            os.kill(starts(tmp_path)[-1], signal.SIGKILL)
            time.sleep(0.5)
        yield second

    engine = make(source=source, engines=2, max_restarts=5)
    engine.update_weights(weights(5), 5)
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    answered, deadline = 0, time.monotonic() + 60
    while len(streamed) < 2:
        assert time.monotonic() < deadline
        of_version(engine.generate(requests(2, start=answered)), 5)
        answered += 2
        time.sleep(0.05)
    of_version(engine.generate(requests(4, start=answered)), 5)


def test_engines_that_hold_different_weights_are_refused(make):
    engine = make(engines=2, table={"own_checksum": True})
    with pytest.raises(TrainingFailed, match="have received different weights"):
        engine.update_weights(weights(1), 1)


def test_copies_of_an_update_use_the_memory_of_those_before(make, tmp_path):
    engine = make()
    engine.update_weights(weights(1), 1)
    before = [tensor.data_ptr() for _, tensor in engine._weights._kept]
    engine.update_weights(weights(2), 2)
    assert [tensor.data_ptr() for _, tensor in engine._weights._kept] == before
    os.kill(starts(tmp_path)[0], signal.SIGKILL)
    of_version(engine.generate(requests(1)), 2)  # the process that replaces it has them


def test_no_copy_of_the_weights_is_kept_where_no_process_can_need_it(make):
    engine = make(max_restarts=0)
    engine.update_weights(weights(1), 1)
    of_version(engine.generate(requests(1)), 1)
    assert engine._weights._kept == []


def test_a_stream_that_breaks_leaves_no_mixture_to_sample_from(make, tmp_path):
    engine = make()
    engine.update_weights(weights(1), 1)

    def breaks():
        yield from list(weights(2))[:1]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        engine.update_weights(breaks(), 2)
    assert engine.version == 1
    with pytest.raises(DataError, match="weights of two versions"):
        engine.generate(requests(1))
    with pytest.raises(DataError, match=r"Unknown weight 'c'"):
        engine.update_weights(iter([*weights(3), ("c", torch.zeros(1))]), 3)
    engine.update_weights(weights(4), 4)
    of_version(engine.generate(requests(2)), 4)
    assert len(starts(tmp_path)) == 1

    def dies_and_breaks():
        yield from list(weights(5))[:1]
        os.kill(starts(tmp_path)[-1], signal.SIGKILL)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        engine.update_weights(dies_and_breaks(), 5)
    with pytest.raises(DataError, match="weights of two versions"):
        engine.generate(requests(1))
    engine.update_weights(weights(6), 6)
    of_version(engine.generate(requests(2)), 6)


@pytest.mark.parametrize(
    ("what", "settings", "cause"),
    [
        (
            "sleep",
            {"command_timeout_minutes": 0.03},
            r"no answer to 'advance' within 0.03 minutes \(rollout.process.command_timeout_minutes\); it is in happens \(",
        ),
        ("freeze", {"heartbeat_timeout_seconds": 4}, "sent no heartbeat for 4 s: it is stopped"),
    ],
)
def test_a_process_that_hangs_is_found_and_after_the_last_restart_the_run_ends_with_its_cause(
    make, tmp_path, what, settings, cause
):
    engine = make(max_restarts=0, **settings)
    with pytest.raises(SamplerLost, match=cause) as caught:
        engine.generate(requests(3, do=what))
    assert f"it will {what}" in str(caught.value)  # its last lines
    assert "which was started again 0 times (rollout.process.max_restarts)" in str(caught.value)
    gone(starts(tmp_path)[0])


def test_one_of_several_ranks_keeps_no_copy_and_is_not_started_again_unless_the_key_is_set(make, tmp_path):
    engine = make(ranks=2)
    engine.update_weights(weights(5), 1)
    assert engine._weights._kept == []
    with pytest.raises(SamplerLost, match="no sampler is started again unless the key is set"):
        engine.generate(requests(3, do="kill"))
    gone(starts(tmp_path)[0])
    engine = make(ranks=2, max_restarts=1)
    engine.update_weights(weights(5), 1)
    assert [name for name, _ in engine._weights._kept] == ["a", "b"]


def test_an_error_of_the_engine_is_that_error_and_the_engine_goes_on(make, tmp_path):
    engine = make()
    with pytest.raises(DataError, match="this request is bad"):
        engine.generate(requests(3, do="raise"))
    assert engine.num_unfinished == 0
    of_version(engine.generate(requests(3)), 0)
    assert len(starts(tmp_path)) == 1


def test_an_abort_in_the_middle_of_a_step_waits_for_its_end(make, tmp_path):
    engine = make()
    asked = requests(3, do="sleep", flag=str(tmp_path / "flag"), seconds=4)
    engine.add(asked)
    done = []
    while len(done) < 1:
        done += engine.step()
    deadline = time.monotonic() + 60
    while not (tmp_path / "flag").exists():
        assert time.monotonic() < deadline
        done += engine.step()
    found = engine.abort(["r2", "no such request"])
    assert [(r.request_id, r.finish_reason) for r in found] == [("r2", "abort")]
    while engine.num_unfinished:
        done += engine.step()
    assert sorted(r.request_id for r in done) == ["r0", "r1"]
    assert engine.abort(["r0"]) == []


def test_a_pause_and_a_sleep_while_it_samples_are_no_failure_afterwards(make, tmp_path):
    engine = make()
    for stop, go_on in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
        asked = requests(3, do="sleep", flag=str(tmp_path / stop.__name__), seconds=1)
        engine.add(asked)
        done = engine.step()
        while not (tmp_path / stop.__name__).exists():
            done += engine.step()
        stop(*(["keep"] if stop == engine.pause else []))
        time.sleep(0.5)  # for what it would do by itself
        go_on()
        while engine.num_unfinished:
            done += engine.step()
        assert sorted(r.request_id for r in done) == [r.id for r in asked]


def test_requests_that_a_signal_cut_off_while_they_were_added_can_be_asked_again(make, monkeypatch):
    class Stop(BaseException):
        pass

    engine = make()
    call = engine.group.call

    def cut(method, **fields):
        call(method, **fields).result()
        if "requests" in fields:
            raise Stop

    monkeypatch.setattr(engine.group, "call", cut)
    with pytest.raises(Stop):
        engine.add(requests(2))
    monkeypatch.undo()
    assert engine.num_unfinished == 0
    assert [r.request_id for r in engine.generate(requests(3))] == ["r0", "r1", "r2"]
    assert engine.step() == []


REFUSALS = [
    (
        {"fail": "memory"},
        EnvironmentProblem,
        r"does not start in the sampler's process .*MemoryError: no room",
    ),
    ({"fail": "exit"}, PluginError, r"(?s)does not start: it exited with status 3\..*last words"),
    ({"fail": "data"}, DataError, "the model is of clay"),
]


@pytest.mark.parametrize(("table", "kind", "message"), REFUSALS)
def test_an_engine_that_does_not_start_is_one_message_and_leaves_no_process(
    make, tmp_path, table, kind, message
):
    with pytest.raises(kind, match=message):
        make(table=table)
    gone(starts(tmp_path)[0])


@pytest.mark.parametrize("name", foreign_interpreter.PACKAGES.values())
def test_another_version_is_refused_with_both(make, monkeypatch, name):
    mine = foreign_interpreter.versions()
    monkeypatch.setattr(foreign_interpreter, "versions", lambda: {**mine, name: "9.9.9"})
    with pytest.raises(
        PluginError, match=rf"has {name} 0\.\d.*, and the trainer has 9\.9\.9\. .*pip install"
    ):
        make()


def test_an_interpreter_that_is_absent_or_without_the_core_is_refused_with_its_key(
    make, tmp_path, interpreter_without
):
    with pytest.raises(ConfigError, match=r"rollout\.process\.python: '.*/nobody' does not start"):
        make(python=str(tmp_path / "nobody"))
    for package, distribution in foreign_interpreter.PACKAGES.items():
        python = str(interpreter_without(package))
        with pytest.raises(
            PluginError,
            match=rf"{package}/python has no {distribution} .* Install it there.* -m pip install engine-core-rl==.* "
            "engine-plugin-processes==",
        ):
            make(python=python)


def test_it_listens_on_this_machine_alone_and_its_commands_have_no_address(make, tmp_path):
    engine = make()
    engine.update_weights(weights(1), 1)
    process = psutil.Process(starts(tmp_path)[0])
    assert {each.laddr.ip for each in process.net_connections(kind="inet")} == {"127.0.0.1"}
    assert engine.pool.workers[0].channel.socket.family.name == "AF_UNIX"
    assert engine.pool.workers[0].channel.socket.getsockname() == ""


OWNER = """
import sys, time, torch
sys.path.insert(0, {here!r})
from pathlib import Path
from engine_core.config import ModelConfig, RolloutConfig
from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_processes.sampler_process.engine import SamplerEngine
from engine_core.types import Prompt, Request, Sampling
plugins = PluginSet.load({{"rollout_engines": {{"counting"}}}}, ["counting_plugin.py"], Path({here!r}))
options = plugins.spec("rollout_engines", "counting").config(starts={starts!r})
config = RolloutConfig(backend="counting", options=options, process=ProcessConfig())
context = WorkerContext(plugins=plugins, role="rollout", device=torch.device("cpu"))
engine = SamplerEngine(config, ModelConfig(), context).build(config)
engine.add([Request("r", Prompt("p", [3], "", {{"do": "freeze"}}), Sampling())])
while True:
    engine.step()
"""


def test_nothing_is_left_when_the_owner_is_killed_also_not_of_a_process_that_is_stopped(tmp_path):
    script = OWNER.format(here=str(HERE), starts=str(tmp_path / "starts"))
    owner = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 120
    while not (tmp_path / "starts").exists() or not starts(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    child = psutil.Process(starts(tmp_path)[0])
    while child.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    keeper = child.children()
    assert len(keeper) == 1
    owner.kill()
    owner.wait()
    gone(child.pid)
    gone(keeper[0].pid)


def test_a_plugin_that_builds_the_model_must_be_there_in_another_environment_too(tmp_path):
    (tmp_path / "model.py").write_text(
        "from engine_core import hookimpl\n\n\n@hookimpl\ndef engine_build_model(role):\n    return None\n"
    )
    for file, role, expected in (("model.py", "rollout", 1), ("model.py", "judge", 0), (None, "rollout", 0)):
        plugins = PluginSet.load({"train_engines": {"torch"}}, [file] if file else [], tmp_path)
        engine = object.__new__(SamplerEngine)
        engine.context = WorkerContext(plugins, role, torch.device("cpu"), actor="torch")
        assert len(engine._model_plugins()) == expected
