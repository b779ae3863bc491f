"""What a run that ends early says last and leaves: its cause, the checkpoint that it verified, the command that goes on."""

import re
import shlex
import signal

import pytest

pytestmark = pytest.mark.chaos

VERIFIED = r"The checkpoint of step (\d+) is verified: all \d+ files \([\d.]+ MB\) match their hashes"
WAY_ON = re.compile(
    r"The newest (?:good )?checkpoint is of step (\d+)\. Resume: engine (resume .+)$", re.MULTILINE
)

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


def goes_on(engine, run, step, patience=60.0):
    """The command that the run named, typed as it is, goes on from ``step`` to the end."""
    told = WAY_ON.search(run.err)
    assert told, run.err
    assert int(told[1]) == step
    resumed = engine.start(*shlex.split(told[2])).wait(patience)
    assert resumed.code == 0, resumed.err
    assert f"Resumed from {engine.folder / 'runs' / 'r' / 'checkpoints'}/step_{step:08d}" in resumed.err


CAUSES = [
    pytest.param("kill", {}, "killed by SIGKILL", id="killed"),
    pytest.param(
        "sleep",
        {"runtime.torchrun.command_timeout_minutes": 0.1},
        "no answer to 'forward_backward' within 0.1 minutes",
        id="stalled",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("how", "changes", "cause"), CAUSES)
def test_a_run_that_loses_a_rank_ends_with_its_cause_a_verified_checkpoint_and_the_way_on(
    engine, hurting, ranks, how, changes, cause
):
    run = engine.start("train", ranks(changes))
    hurting.later(run, ["actor", 1, "forward", how])
    hurting.ended(run)
    assert run.code == 6
    lines = run.err.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("engine: "))  # and its last words below
    verified, failed, lost = lines[at - 2 : at + 1]
    found = re.search(VERIFIED, verified)
    assert found, run.err
    step = int(found[1])
    assert f"The run failed in step {step + 1}. The newest checkpoint is of step {step}." in failed
    assert lost.startswith("engine: Lost worker actor[1]")
    assert cause in lost
    goes_on(engine, run, step, hurting.patience)


def test_a_restart_goes_on_from_the_checkpoint_that_the_end_has_verified(engine, hurting, ranks, tiny_plugin):
    run = engine.start("train", ranks({"runtime.torchrun.max_restarts": 1}))
    hurting.later(run, ["actor", 1, "forward", "kill"])
    hurting.ended(run)
    assert run.code == 0, run.err
    found = re.search(VERIFIED, run.err)
    assert found, run.err
    assert f"resuming from step_{int(found[1]):08d} with new workers" in run.err


def test_a_failure_whose_newest_checkpoint_is_damaged_names_the_file_and_the_older_one_that_is_good(
    engine, tiny, tiny_plugin
):
    path = tiny(plugin=damaging(tiny_plugin, [2]))
    run = engine("train", path, env={"ENGINE_FAULT": "step.generate@3:raise"})
    assert run.code == 1
    damaged = engine.folder / "runs" / "r" / "checkpoints" / "step_00000002"
    assert (
        f"Checkpoint {damaged} is not usable: actor/weights.safetensors does not match its hash." in run.err
    )
    assert "The checkpoint of step 1 is verified: all " in run.err
    assert "The newest good checkpoint is of step 1. Resume: engine resume " in run.err
    assert "Resume: engine resume " in run.err.splitlines()[-1]  # below the traceback of a bug
    goes_on(engine, run, 1)


def test_a_failure_of_whose_checkpoints_none_is_good_says_so(engine, tiny, tiny_plugin):
    path = tiny(plugin=damaging(tiny_plugin, [1, 2]))
    run = engine("train", path, env={"ENGINE_FAULT": "step.generate@3:raise"})
    assert run.code == 1
    assert run.err.count(" is not usable: actor/weights.safetensors does not match its hash.") == 2
    assert "The run failed in step 3. None of its checkpoints can be used" in run.err
    assert "Go on:" not in run.err


def test_a_failure_without_a_checkpoint_says_so(engine, tiny):
    run = engine("train", tiny({"checkpoint.every_steps": 0}), env={"ENGINE_FAULT": "step.train@2:raise"})
    assert run.code == 1
    assert "The run failed in step 2. No checkpoint was saved: set checkpoint.every_steps" in run.err
    assert "verified" not in run.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_verifies_what_it_has_saved(engine, tiny, number, code):
    run = engine.start("train", tiny({"run.steps": 100_000, "checkpoint.every_steps": 0}))
    run.until(lambda: "reward" in run.err, "a step")
    run.send(number)
    run.wait()
    assert (run.code if run.code >= 0 else 128 - run.code) == code
    stopped = re.search(r"Stopped by \S+ after step (\d+)\. The newest checkpoint is of step \1\.", run.err)
    assert stopped, run.err
    assert re.search(VERIFIED, run.err)[1] == stopped[1]


def test_a_stop_whose_checkpoint_a_disk_has_damaged_names_the_one_before(engine, tiny, tiny_plugin):
    path = tiny(plugin=damaging(tiny_plugin, [3]))  # in step 3, which the stop leaves
    run = engine("train", path, env={"ENGINE_FAULT": "step.generate@3:term"})
    assert run.code == 75
    assert "step_00000002 is not usable: actor/weights.safetensors does not match its hash." in run.err
    assert "The newest good checkpoint is of step 1. Resume: engine resume " in run.err


def test_a_start_that_is_refused_late_is_not_in_the_way_of_the_next_one(engine, tiny, tiny_plugin):
    needs_more = tiny_plugin.replace("def bytes_share(completions)", "def bytes_share(completions, absent)")
    refused = engine("train", tiny(plugin=needs_more))
    assert refused.code == 4, refused.err
    run = engine("train", tiny())
    assert run.code == 0, run.err
    assert "left by a start in which nothing was trained; its log is in logs/attempt_0." in run.err
    logs = engine.folder / "runs" / "r" / "logs"
    assert "absent" in (logs / "attempt_0" / "rank_0.log").read_text()
    assert "absent" not in (logs / "attempt_1" / "rank_0.log").read_text()
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
