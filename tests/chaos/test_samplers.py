"""Row 18: the process of a sampler dies, while it samples and while it waits, once and again and again."""

import json
import os
import signal

import pytest

from engine_core.temporary_folder import remove_abandoned

pytestmark = pytest.mark.chaos

SAMPLER = """
import os, signal, sys
from pathlib import Path
from engine_core.specs import RolloutBackend
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions

FOLDER = Path(__file__).parent


class Fragile(HFRolloutEngine):
    def step(self):
        if self.version == 1 and (not (FOLDER / "died").exists() or (FOLDER / "often").exists()):
            (FOLDER / "died").touch()
            print("last words of the sampler", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        done = super().step()
        for rollout in done if self.version == 1 and (FOLDER / "forges").exists() else ():
            rollout.group_id += 1
        return done


@hookimpl
def engine_rollout_engines():
    return {"fragile": RolloutBackend(load=Fragile, config=HFOptions)}
"""
OWN = {"rollout.process": {}, "rollout.backend": "fragile"}
PATIENCE = 150  # seconds: a process imports torch


def samplers(run):
    """The sampler's process; its keeper has the same words."""
    return [process for process in run.family() if "engine_plugin_processes.worker" in process.cmdline()]


def ended(process):
    process.wait(PATIENCE)
    assert process.orphans() == []
    return process


def test_a_run_goes_on_without_a_trace_when_its_sampler_dies_while_it_samples(
    engine, tiny, tiny_plugin, metrics, tmp_path
):
    changes = {**OWN, "run.steps": 3}
    path = tiny(changes, plugin=tiny_plugin + SAMPLER)
    (tmp_path / "died").touch()
    run = ended(engine.start("train", path))
    assert run.code == 0, run.err
    timed = ("time", "throughput/", "memory/", "sync/")
    straight = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in metrics()]
    (tmp_path / "died").unlink()
    hurt = engine.start("train", path, "--set", "run.name=s")
    ended(hurt)
    assert hurt.code == 0, hurt.err
    assert "Lost worker rollout[0] on" in hurt.err
    assert "it was killed by SIGKILL" in hurt.err
    assert "It is started again (1 of 3, rollout.process.max_restarts)" in hurt.err
    lines = [
        json.loads(line) for line in (tmp_path / "runs" / "s" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines] == straight


@pytest.mark.slow
def test_one_that_returns_rollouts_of_other_groups_ends_the_run_and_a_resume_loses_nothing(
    engine, tiny, tiny_plugin, metrics, tmp_path
):
    path = tiny({**OWN, "run.steps": 2, "checkpoint.every_steps": 1}, plugin=tiny_plugin + SAMPLER)
    for name in ("died", "forges"):
        (tmp_path / name).touch()
    run = ended(engine.start("train", path))
    assert run.code == 3, run.err
    assert "the prompt, the group or the index of another request. This is a bug of the plugin." in run.err
    assert "Traceback" not in run.err
    (tmp_path / "forges").unlink()
    resumed = ended(engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err
    assert [line["step"] for line in metrics()] == [1, 2]


@pytest.mark.slow
def test_one_that_dies_again_and_again_ends_the_run_with_its_cause_and_a_checkpoint(
    engine, tiny, tiny_plugin, tmp_path
):
    (tmp_path / "often").touch()
    changes = {**OWN, "rollout.process": {"max_restarts": 1}, "run.steps": 3, "checkpoint.every_steps": 0}
    run = ended(engine.start("train", tiny(changes, plugin=tiny_plugin + SAMPLER)))
    assert run.code == 6
    assert "Lost the sampler rollout[0] on " in run.err
    assert "killed by SIGKILL" in run.err
    assert "last words of the sampler" in run.err
    assert "Traceback" not in run.err
    assert "The newest checkpoint is of step 1. Resume: engine resume" in run.err
    (tmp_path / "often").unlink()
    resumed = ended(engine.start("resume", "r"))
    assert resumed.code == 0, resumed.err


@pytest.mark.slow
def test_nothing_is_left_of_a_sampler_that_is_stopped_when_the_run_is_killed(
    engine, tiny, tiny_plugin, tmp_path
):
    (tmp_path / "died").touch()
    (temporary := tmp_path / "temporary").mkdir()
    path = tiny({**OWN, "run.steps": 1000}, plugin=tiny_plugin + SAMPLER)
    run = engine.start("train", path, prelude=f"import tempfile\ntempfile.tempdir = {str(temporary)!r}")
    run.until(lambda: run.err.count("reward ") >= 1, "a step", PATIENCE)  # its sampler lives
    assert len(samplers(run)) == 2
    (sampler,) = [each for each in samplers(run) if os.getpgid(each.pid) == each.pid]
    sampler.suspend()
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert run.orphans() == []
    for left in temporary.glob("engine-*"):
        os.utime(left, (0, 0))
    remove_abandoned(temporary)
    assert list(temporary.glob("engine-*")) == []
