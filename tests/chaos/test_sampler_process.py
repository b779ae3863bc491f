"""The process of a sampler that is lost while idle, in an update, by a hang and by a stop, and one of several samplers, in whole runs."""

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLER = """
import os, signal, sys, time
from pathlib import Path
import psutil
from engine_core.specs import RolloutBackend
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions

FOLDER = Path(__file__).parent


def due(name):
    # Whether a file names this fault; once, in one process.
    try:
        (FOLDER / name).rename(FOLDER / f"{name} happened")
    except FileNotFoundError:
        return False
    print(f"last words before {name}", file=sys.stderr, flush=True)
    return True


def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def read(stream, version):
    for number, each in enumerate(stream):
        if number == 1 and due(f"update {version}"):
            kill()
        yield each


class Sampler(HFRolloutEngine):
    def step(self):
        if due(f"die {self.version}"):
            kill()
        if due(f"stop {self.version}"):
            kill(signal.SIGSTOP)
        if due(f"hang {self.version}"):
            time.sleep(600)
        return super().step()

    def update_weights(self, stream, version):
        return super().update_weights(read(stream, version), version)


@hookimpl
def engine_on_event(event, step):
    if event == "step_finished" and due(f"idle {step}"):
        for process in psutil.process_iter(["cmdline", "environ"]):
            ours = (process.info["environ"] or {}).get("ENGINE_CHAOS_TEST") == os.environ["ENGINE_CHAOS_TEST"]
            if ours and "engine_plugin_processes.worker" in process.info["cmdline"]:
                process.kill()


@hookimpl
def engine_rollout_engines():
    return {"lost": RolloutBackend(load=Sampler, config=HFOptions, capabilities=frozenset({"pause"}))}
"""
ALONE = {
    "rollout.backend": "lost",
    "rollout.process": {"max_restarts": 4, "heartbeat_timeout_seconds": 6.0, "command_timeout_minutes": 0.2},
    "run.steps": 5,
}


@pytest.fixture
def train(engine, tiny, tiny_plugin, hurting):
    """``train(changes, faults)``: a run in which these happen."""

    def run(changes, faults):
        for fault in faults:
            (engine.folder / fault).touch()
        ended = hurting.ended(engine.start("train", tiny(changes, plugin=tiny_plugin + SAMPLER)), times=3)
        assert ended.code == 0, ended.err
        assert [fault for fault in faults if not (engine.folder / f"{fault} happened").exists()] == []
        return ended

    return run


def test_a_sampler_that_is_lost_while_idle_in_an_update_or_by_a_hang_is_restarted_and_the_result_is_unchanged(
    train, straight, tiny_plugin, result, hurting
):
    run = train(ALONE, ["idle 1", "update 2", "hang 3", "stop 4"])
    assert run.err.count("Lost worker rollout[0] on ") == 4
    assert "It is started again (4 of 4, rollout.process.max_restarts)" in run.err
    assert "(rollout.process.command_timeout_minutes); it is in step (" in run.err
    assert "sent no heartbeat for 6 s: it is stopped" in run.err
    for last in ("update 2", "hang 3", "stop 4"):
        assert f"last words before {last}" in run.err
    assert result() == straight(ALONE, plugin=tiny_plugin + SAMPLER, patience=hurting.patience)


SEVERAL = {
    "trainer": "async",
    "async.order": "admitted",
    "rollout.backend": "lost",
    "rollout.transport": "tcp",
    "rollout.lost": {"batch_size": 2},
    "runtime.backend": "torchrun",
    "placement.pools": {"train": 1, "serve": 3},  # one is left of them
    "placement.actor": "train",
    "placement.rollout": "serve",
    "runtime.torchrun.max_replacements": 2,
    "run.steps": 6,
}


def test_samplers_of_several_that_are_lost_while_they_sample_and_in_an_update_cost_no_prompt(
    train, straight, tiny_plugin, metrics, result, hurting
):
    run = train(SEVERAL, ["die 1", "update 3"])
    assert "is sent again to the remaining receivers" in run.err
    assert sum(line["sampling/lost"] for line in metrics()) == 2
    assert sum(line["sampling/reissued"] for line in metrics()) >= 1
    expected = straight(SEVERAL, plugin=tiny_plugin + SAMPLER, patience=hurting.patience)
    ids = lambda samples: {name: [each[:2] for each in step] for name, step in samples.items()}  # noqa: E731
    assert ids(result()["samples"]) == ids(expected["samples"])
