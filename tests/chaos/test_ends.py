"""What a run that ends early says last and leaves: its cause, and the command that goes on from its newest good checkpoint."""

import re
import shlex
import signal

import pytest

pytestmark = pytest.mark.chaos

WAY_ON = re.compile(r"The newest checkpoint is of step (\d+)\. Resume: engine (resume .+)$", re.MULTILINE)

DAMAGING = '''

@hookimpl
def engine_on_event(event, step, data):
    """A disk that loses a bit of what was saved after step STEPS."""
    if event == "checkpoint_saved" and step in STEPS:
        file = Path(data["path"]) / "actor" / "weights.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
'''


def damaging(plugin, steps):
    return "from pathlib import Path\n" + plugin + DAMAGING.replace("STEPS", str(steps))


def goes_on(engine, run, newest, patience=60.0, good=None):
    """The command that the run named, typed as it is, goes on from the newest good checkpoint to the end."""
    told = WAY_ON.search(run.err)
    assert told, run.err
    assert int(told[1]) == newest
    step = newest if good is None else good
    resumed = engine.start(*shlex.split(told[2])).wait(patience)
    assert resumed.code == 0, resumed.err
    assert f"Resumed from {engine.folder / 'runs' / 'r' / 'checkpoints'}/step_{step:08d}" in resumed.err
    return resumed


CAUSES = [
    pytest.param("kill", {}, "killed by SIGKILL", id="killed", marks=pytest.mark.slow),
    pytest.param(
        "sleep",
        {"runtime.torchrun.command_timeout_minutes": 0.1},
        "no answer to 'forward_backward' within 0.1 minutes",
        id="stalled",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("how", "changes", "cause"), CAUSES)
def test_a_run_that_loses_a_rank_ends_with_its_cause_and_the_way_on(
    engine, hurting, ranks, how, changes, cause
):
    run = engine.start("train", ranks(changes))
    hurting.later(run, ["actor", 1, "forward", how])
    hurting.ended(run)
    assert run.code == 6
    lines = run.err.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("engine: "))  # and its last words below
    failed, lost = lines[at - 1 : at + 1]
    found = re.search(r"The run failed in step (\d+)\. The newest checkpoint is of step (\d+)\.", failed)
    assert found, run.err
    step = int(found[2])
    assert int(found[1]) == step + 1
    assert lost.startswith("engine: Lost worker actor[1]")
    assert cause in lost
    goes_on(engine, run, step, hurting.patience)


def test_a_restart_goes_on_from_the_newest_checkpoint(engine, hurting, ranks, tiny_plugin):
    run = engine.start("train", ranks({"runtime.torchrun.max_restarts": 1}))
    hurting.later(run, ["actor", 1, "forward", "kill"])
    hurting.ended(run)
    assert run.code == 0, run.err
    found = WAY_ON.search(run.err)
    assert found, run.err
    assert f"resuming from step_{int(found[1]):08d} with new workers" in run.err


def test_the_way_on_leads_past_a_checkpoint_that_a_disk_has_damaged(engine, tiny, tiny_plugin):
    path = tiny(plugin=damaging(tiny_plugin, [2]))
    run = engine("train", path, env={"ENGINE_FAULT": "step.generate@3:raise"})
    assert run.code == 1
    assert "Resume: engine resume " in run.err.splitlines()[-1]  # below the traceback of a bug
    resumed = goes_on(engine, run, 2, good=1)
    assert "actor/weights.safetensors does not match its hash" in resumed.err


def test_a_failure_without_a_checkpoint_says_so(engine, tiny):
    run = engine("train", tiny({"checkpoint.every_steps": 0}), env={"ENGINE_FAULT": "step.train@2:raise"})
    assert run.code == 1
    assert "The run failed in step 2. No checkpoint was saved: set checkpoint.every_steps" in run.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_names_what_it_has_saved(engine, tiny, number, code):
    run = engine.start("train", tiny({"run.steps": 100_000, "checkpoint.every_steps": 0}))
    run.until(lambda: "reward" in run.err, "a step")
    run.send(number)
    run.wait()
    assert (run.code if run.code >= 0 else 128 - run.code) == code
    stopped = re.search(r"Stopped by \S+ after step (\d+)\. The newest checkpoint is of step \1\.", run.err)
    assert stopped, run.err


def test_a_start_that_is_refused_late_is_not_in_the_way_of_the_next_one(engine, tiny, tiny_plugin):
    needs_more = tiny_plugin.replace("def bytes_share(completions)", "def bytes_share(completions, absent)")
    refused = engine("train", tiny(plugin=needs_more))
    assert refused.code == 4, refused.err
    run = engine("train", tiny())
    assert run.code == 0, run.err
    assert "left by a start in which nothing was trained; its log is in logs/attempt_0." in run.err
    logs = engine.folder / "runs" / "r" / "logs"
    assert "absent" in (logs / "attempt_0" / "run.log").read_text()
    assert "absent" not in (logs / "attempt_1" / "run.log").read_text()
    again = engine("train", tiny())
    assert again.code == 2  # now there is something in it
    assert "run.name: 'r' exists already" in again.err


@pytest.mark.parametrize("point", ["run.setup", "step.train"])
def test_neither_is_one_that_was_killed_before_anything_was_learned(engine, tiny, straight, result, point):
    changes = {"tracking.rollouts_every_steps": 0}
    killed = engine("train", tiny(changes), env={"ENGINE_FAULT": f"{point}:kill"})
    assert killed.code == -signal.SIGKILL
    run = engine("train", tiny(changes))
    assert run.code == 0, run.err
    assert result() == straight(changes)
