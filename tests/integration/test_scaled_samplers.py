"""Samplers come and leave while a run goes on, as ``engine scale`` says: no sample is lost or made twice, and nothing is left of them."""

import json
import logging
import time

import psutil
import pytest

from engine_core.cli.main import main
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.rollouts import RolloutSource
from engine_plugin_processes.replaceable_group import ReplaceableGroup, SurvivingFlow
from engine_plugin_processes.replacement import Replacements
from engine_plugin_processes.worker_process import WorkerHandle

pytestmark = pytest.mark.slow

JOIN_SECONDS = 120.0
POOLS = {
    "runtime.backend": "torchrun",
    "placement.pools": {"serve": 1, "train": 1},
    "placement.max_samplers": {"serve": 3},
    "placement.actor": "train",
    "placement.rollout": "serve",
    "rollout.hf.batch_size": 2,
}


@pytest.fixture
def run(grpo, digits_plugin, trained):
    """A run of some steps: its metrics, samples by step, and folder."""

    def train(name, **changes):
        settings = {**grpo, **POOLS, "run.name": name, "reward": [{"name": "digits", "workers": 0}]}
        settings |= {"plugins": [str(digits_plugin)], "tracking.rollouts_every_steps": 1, **changes}
        return trained(settings)

    return train


@pytest.fixture
def processes(monkeypatch):
    """Of the workers, as they are started."""
    started, start = [], WorkerHandle.start.__func__

    def noting(cls, rank, env):
        handle = start(cls, rank, env)
        started.append(handle.process.pid)
        return handle

    monkeypatch.setattr(WorkerHandle, "start", classmethod(noting))
    return started


@pytest.fixture
def asked(monkeypatch):
    """The numbers of samplers that were asked for something, by policy version."""
    to, send, found = ReplaceableGroup._to, SurvivingFlow._send, {}

    def note(group, at):
        found.setdefault(group.version, set()).add(at)

    def noting(group, at, *arguments):
        note(group, at)
        return to(group, at, *arguments)

    def flowing(flow, at, plain, texts):
        if plain["requests"]:
            note(flow.group, at)
        send(flow, at, plain, texts)

    monkeypatch.setattr(ReplaceableGroup, "_to", noting)
    monkeypatch.setattr(SurvivingFlow, "_send", flowing)
    monkeypatch.setattr(ReplaceableGroup, "version", 0, raising=False)
    return found


@pytest.fixture
def wishes(monkeypatch, asked):
    """What a user types before the updates to some policy versions; each update waits for who is to come."""
    sync, change, typed, done = RolloutSource.sync, Replacements.change, {}, []

    def typing(source, updated=True):
        version = source.version + updated
        if updated and version in typed:
            wish = typed[version]
            done.append(
                wish(source) if callable(wish) else main(["scale", str(source.run.folder.path), str(wish)])
            )
        found = sync(source, updated)
        ReplaceableGroup.version = source.version
        return found

    def waiting(replacements):
        replacements._adjust()
        deadline = time.monotonic() + JOIN_SECONDS
        while set(replacements._coming) - set(replacements._ready) and time.monotonic() < deadline:
            time.sleep(0.05)
        return change(replacements)

    monkeypatch.setattr(RolloutSource, "sync", typing)
    monkeypatch.setattr(Replacements, "change", waiting)
    yield typed
    assert done
    assert not any(done)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of(folder, name):
    return [line[f"sampling/{name}"] for line in metrics(folder)]


def samples(folder):
    """Rollouts by file."""
    return {file.name: read_rollouts(file) for file in sorted((folder / "rollouts").rglob("*.parquet"))}


def ids(folder):
    return {name: sorted(each.request_id for each in rollouts) for name, rollouts in samples(folder).items()}


def ended(pids):
    """Whether none of these lives."""
    return not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("trainer", "transport"), [("rl", "broadcast"), ("rl", "folder"), ("async", "tcp"), ("async", "auto")]
)
def test_samplers_come_and_leave_and_the_samples_are_those_of_a_run_with_one(
    run, wishes, asked, processes, monkeypatch, tmp_path, trainer, transport
):
    how = {"trainer": trainer, "rollout.transport": transport, "run.steps": 6}
    if transport == "folder":
        how["rollout.folder.path"] = str(tmp_path)
    if trainer == "async":  # else a step takes whichever groups are ready first
        how["async.order"] = "admitted"
    wishes |= {1: 2, 2: 3, 4: 1}
    folder = run("scaled", **how)
    assert of(folder, "samplers") == [2, 3, 3, 1, 1, 1]
    assert of(folder, "joined") == [1, 1, 0, 0, 0, 0]
    assert of(folder, "left") == [0, 0, 0, 2, 0, 0]
    assert of(folder, "lost") == [0] * 6
    assert (asked[0], asked[1], asked[2], asked[4]) == ({0}, {0, 1}, {0, 1, 2}, {0})
    assert len(processes) == 4
    assert ended(processes)
    most = 0 if trainer == "rl" else 1  # policy versions that a token may be old
    for step, rollouts in enumerate(samples(folder).values(), 1):
        versions = {int(v) for each in rollouts for v in each.policy_versions[each.loss_mask]}
        assert versions <= set(range(step - 1 - most, step)), step
    monkeypatch.undo()
    wishes.clear()
    assert ids(folder) == ids(run("straight", **how))


def test_one_that_came_and_is_lost_is_gone_until_it_is_asked_for_again(run, wishes, processes, caplog):
    def kill(source):
        psutil.Process(processes[-1]).kill()
        return 0

    wishes |= {1: 2, 2: kill, 4: 2}
    with caplog.at_level(logging.INFO, "engine"):
        folder = run("lost", **{"run.steps": 5})
    assert sum(of(folder, "lost")) == 1
    assert (of(folder, "samplers")[0], of(folder, "samplers")[2:]) == (2, [1, 2, 2])
    assert "Samplers wanted now: 1" in caplog.text
    assert len({id for found in ids(folder).values() for id in found}) == 5 * 16
    assert ended(processes)


def test_what_one_that_leaves_has_under_way_is_asked_of_the_others(run, wishes):
    """The first step takes a quarter of what was asked for before it, and its update comes at once."""

    def at_work(source):
        assert source.run.groups["rollout"].thread.group.running.under_way[1]
        return main(["scale", str(source.run.folder.path), "1"])

    how = {"trainer": "async", "async.order": "admitted", "async.max_staleness": 3, "run.steps": 7}
    how |= {"placement.pools": {"serve": 2, "train": 1}, "rollout.max_response_tokens": 200}
    wishes[1] = at_work
    folder = run("leaves", **how)
    assert sum(of(folder, "left")) == 1
    assert sum(of(folder, "reissued")) >= 1
    found = [id for step in ids(folder).values() for id in step]
    assert len(found) == len(set(found)) == 7 * 16


def test_a_wish_holds_after_a_resume_and_a_broken_one_is_ignored(run, wishes, caplog):
    def broken(source):
        (source.run.folder.path / "samplers.json").write_text("{")
        return 0

    wishes |= {1: 2, 2: broken}
    folder = run("first", **{"run.steps": 3, "checkpoint.every_steps": 3})
    assert of(folder, "samplers") == [2, 2, 2]
    assert "samplers.json is ignored" in caplog.text
    (folder / "samplers.json").write_text(json.dumps({"samplers": 3}))
    wishes.clear()
    assert main(["resume", str(folder), "--steps", "4"]) == 0
    assert of(folder, "samplers") == [2, 2, 2, 3]
