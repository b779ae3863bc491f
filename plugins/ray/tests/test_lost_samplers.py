"""One of two samplers is killed during a run: the run ends with the same samples, and another sampler replaces it."""

import os
import signal
import time

import pytest

from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.trainer import Trainer
from engine_plugin_processes.flow import Flow
from engine_plugin_processes.replacement import Replacements
from engine_plugin_processes.worker_group import RemoteWorkerGroup
from engine_plugin_trainers.async_trainer import AsyncTrainer

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

TWO = {
    "runtime.backend": "ray",
    "runtime.ray.max_replacements": 1,
    "placement.pools": {"train": 1, "serve": 2},
    "placement.actor": "train",
    "placement.rollout": "serve",
    "rollout.hf.batch_size": 2,
    "run.steps": 4,
    "algorithm.kl_coef": 0.0,
    "tracking.rollouts_every_steps": 1,
}
JOIN_SECONDS = 120.0


@pytest.fixture
def killed(monkeypatch):
    """Kill the second sampler when it has received its third command; an update waits for its replacement."""
    to, send, join, given = RemoteWorkerGroup.generate_on, Flow._send, Replacements.join, []

    def count(crew, at):
        if at == 1:
            given.append(at)
            if len(given) == 3:
                os.kill(crew.workers[2].pid, signal.SIGKILL)

    def counting(group, at, *arguments):
        reply = to(group, at, *arguments)
        if group.replacements is not None:
            count(group.crew, at)
        return reply

    def flowing(flow, at, plain):
        send(flow, at, plain)
        if plain["requests"]:
            count(flow.group.crew, at)

    def waiting(replacements):
        deadline = time.monotonic() + JOIN_SECONDS
        while replacements.away and not replacements._ready and time.monotonic() < deadline:
            time.sleep(0.05)
        return join(replacements)

    monkeypatch.setattr(RemoteWorkerGroup, "generate_on", counting)
    monkeypatch.setattr(Flow, "_send", flowing)
    monkeypatch.setattr(Replacements, "join", waiting)


def samples(folder):
    return {
        file.name: sorted(each.request_id for each in read_rollouts(file))
        for file in sorted(folder.rglob("*.parquet"))
    }


@pytest.mark.parametrize(
    ("trainer", "kind", "transport"), [("rl", Trainer, "auto"), ("async", AsyncTrainer, "tcp")]
)
def test_a_killed_sampler_is_replaced_singly_and_the_samples_are_the_same(
    cluster, train, tmp_path, killed, monkeypatch, trainer, kind, transport
):
    how = TWO | {"trainer": trainer, "rollout.transport": transport}
    if trainer == "async":  # otherwise a step takes the groups that are ready first
        how["async.order"] = "admitted"
    lines = train("lost", kind, **how)["metrics"]
    counts = {
        name: sum(line[f"sampling/{name}"] for line in lines) for name in ("lost", "joined", "reissued")
    }
    assert (counts["lost"], counts["joined"]) == (1, 1)
    assert counts["reissued"] >= 1
    monkeypatch.undo()
    train("straight", kind, **how)
    runs = tmp_path / "runs"
    assert samples(runs / "lost" / "rollouts") == samples(runs / "straight" / "rollouts")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
