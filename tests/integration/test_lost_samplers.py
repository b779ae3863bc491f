"""One of two samplers is killed in the midst of a run: the run ends as without it, and the counters say what happened."""

import json
import time

import pytest

from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_processes.flow import Flow
from engine_plugin_processes.replacement import Replacements
from engine_plugin_processes.worker_group import RemoteWorkerGroup

pytestmark = pytest.mark.slow

JOIN_SECONDS = 120.0
POOLS = {
    "runtime.backend": "torchrun",
    "placement.pools": {"train": 1, "serve": 2},
    "placement.actor": "train",
    "placement.rollout": "serve",
    "runtime.torchrun.max_replacements": 1,
    "rollout.hf.batch_size": 2,
}


@pytest.fixture
def run(grpo, tmp_path, trained):
    """A run of three steps: ids of its samples by step, and the sums of its counters."""
    (tmp_path / "digits.py").write_text(
        "from engine_core import hookimpl\nfrom engine_core.specs import Reward\n"
        "def digits(completions):\n    return [float(any(c.isdigit() for c in text)) for text in completions]\n"
        "@hookimpl\ndef engine_rewards():\n    return {'digits': Reward(load=digits)}\n"
    )

    def train(name, **changes):
        settings = {
            **grpo,
            **POOLS,
            "run.name": name,
            "run.steps": 4,
            "reward": [{"name": "digits", "workers": 0}],
        }
        settings |= {"plugins": [str(tmp_path / "digits.py")], "tracking.rollouts_every_steps": 1, **changes}
        folder = trained(settings)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        names = ("sampling/lost", "sampling/joined", "sampling/reissued")
        return {
            "samples": {
                file.name: sorted(each.request_id for each in read_rollouts(file))
                for file in sorted((folder / "rollouts").rglob("*.parquet"))
            },
            "counts": {name: sum(line.get(name, 0) for line in lines) for name in names},
            "steps": [line["step"] for line in lines],
        }

    return train


@pytest.fixture
def killed(monkeypatch):
    """The second sampler is killed when it has been given its third piece of work; an update waits for its successor."""
    to, send, join, given = RemoteWorkerGroup.generate_on, Flow._send, Replacements.join, []

    def count(crew, at):
        if at == 1:
            given.append(at)
            if len(given) == 3:
                crew.workers[2].process.popen.kill()

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


@pytest.mark.parametrize(("trainer", "transport"), [("rl", "broadcast"), ("async", "tcp")])
def test_the_run_ends_with_the_same_samples_and_a_new_sampler_takes_part(
    run, killed, monkeypatch, trainer, transport
):
    how = {"trainer": trainer, "rollout.transport": transport}
    if trainer == "async":  # else a step takes whichever groups are ready first
        how["async.order"] = "admitted"
    with_loss = run("lost", **how)
    assert (with_loss["counts"]["sampling/lost"], with_loss["counts"]["sampling/joined"]) == (1, 1)
    assert with_loss["counts"]["sampling/reissued"] >= 1
    monkeypatch.undo()
    straight = run("straight", **how)
    assert straight["counts"] == {"sampling/lost": 0, "sampling/joined": 0, "sampling/reissued": 0}
    assert with_loss["samples"] == straight["samples"]
    assert with_loss["steps"] == straight["steps"] == [1, 2, 3, 4]
