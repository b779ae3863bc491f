"""Rollouts that run ahead: the synchronous run at staleness 0, bounded staleness above, nothing lost or repeated."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from engine_core import load_config
from engine_core.errors import ConfigError, PluginError
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.trainer import Trainer
from engine_core.train.update import fresh_gap
from engine_plugin_tools.advice import advice
from engine_plugin_trainers.async_trainer import AsyncTrainer

pytestmark = pytest.mark.usefixtures("forked_workers")

TIMED = ("time", "throughput/", "memory/", "sync/")
AHEAD = {"trainer": "async", "rollout.weights": "own"}


def digits(completions):
    """Share of characters that are digits: a reward with a spread for a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture
def train(grpo):
    """``train(name, changes)``: trainer, its lines without times, its samples, its weights."""

    def run(name, changes, kind=AsyncTrainer):
        settings = {
            **grpo,
            "rollout.hf.batch_size": 5,  # several parts a step
            "reward": [{"name": "length", "workers": 2, "length": {"max_tokens": 8, "buffer_tokens": 4}}],
            "tracking.rollouts_every_steps": 1,
            "checkpoint.at_end": False,
            "run.name": name,
            "run.steps": 3,
            **changes,
        }
        trainer = kind(load_config(overrides=settings), rewards=[digits])
        trainer.train()
        weights = {n: t.clone() for n, t in trainer.runtime.engines["actor"].named_weights()}
        trainer.close()
        return trainer, weights, result_of(trainer.folder.path)

    return run


def result_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "lines": lines,
        "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines],
        "samples": [
            [(r.request_id, r.group_id, r.token_ids.tolist(), r.policy_versions[r.loss_mask].tolist(), r.rewards)
             for r in read_rollouts(file)]
            for file in sorted((run / "rollouts").glob("*.parquet"))
        ],
    }  # fmt: skip


def threads():
    return {thread.name for thread in threading.enumerate()} & {"sampling", "scoring"}


@pytest.mark.parametrize("always", [False, True])
def test_with_staleness_0_the_run_is_the_synchronous_one_bit_for_bit(train, monkeypatch, always):
    _, expected, sync = train("sync", {"rollout.weights": "own"}, Trainer)
    if always:  # through the threads and the queue, although nothing runs ahead
        monkeypatch.setattr(AsyncTrainer, "runs_ahead", True)
        monkeypatch.setattr(AsyncTrainer, "off_policy", False)
    _, weights, found = train("zero", AHEAD | {"async.max_staleness": 0})
    own = {name for line in found["metrics"] for name in line if name.startswith("async/")}
    assert bool(own) == always
    found["metrics"] = [{k: v for k, v in line.items() if k not in own} for line in found["metrics"]]
    assert found["metrics"] == sync["metrics"]
    assert found["samples"] == sync["samples"]
    assert len(sync["metrics"]) == 3
    assert all(line["actor/grad_norm"] > 0 for line in sync["metrics"])
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("order", ["ready", "admitted"])
def test_every_prompt_is_learned_from_once_by_tokens_of_bounded_age(train, staleness, order):
    changes = {"async.max_staleness": staleness, "async.order": order, "run.steps": 5}
    _, _, found = train("ahead", AHEAD | changes)
    seen = [sample[0] for step in found["samples"] for sample in step]
    assert sorted(seen) == sorted(f"{s}:{g}:{i}" for s in range(1, 6) for g in range(4) for i in range(4))
    for step, samples in enumerate(found["samples"], 1):
        assert [s[1] for s in samples] == [
            i // 4 for i in range(16)
        ]  # groups of a step have ids of their own
        oldest = min(min(s[3]) for s in samples)
        assert step - 1 - oldest <= staleness
    assert max(line["async/staleness_max"] for line in found["lines"]) >= 1  # it did run ahead
    assert threads() == set()


@pytest.mark.parametrize(
    "how", ["keep", *(pytest.param(how, marks=pytest.mark.slow) for how in ("abort", "drain"))]
)
def test_a_sampler_in_its_own_process_runs_ahead_however_weights_are_updated(train, how):
    changes = {"rollout.process": {}, "rollout.weights": "auto", "async.weight_updates": how, "run.steps": 4}
    _, _, found = train(how, AHEAD | changes)
    seen = [sample[0] for step in found["samples"] for sample in step]
    assert sorted(seen) == sorted(f"{s}:{g}:{i}" for s in range(1, 5) for g in range(4) for i in range(4))
    for step, samples in enumerate(found["samples"], 1):
        assert all(step - 1 - min(s[3]) <= 1 for s in samples)
    for line in found["lines"]:  # tokens of the present weights are those of the present weights
        assert fresh_gap(line) < 1e-4
    assert threads() == set()


def refused(grpo, changes):
    with pytest.raises(ConfigError) as error:
        AsyncTrainer(load_config(overrides={**grpo, **AHEAD, **changes}), rewards=[digits])
    return str(error.value)


@pytest.mark.parametrize("chosen", [None, "3"], ids=["unset", "set by the user"])
def test_a_sampler_in_its_own_process_and_the_trainer_share_the_cores(grpo, monkeypatch, chosen):
    if chosen is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        settings = {**grpo, "trainer": "async", "rollout.process": {}, "run.name": "cores"}
        trainer = AsyncTrainer(load_config(overrides=settings), rewards=[digits])
        trainer.setup(training=True)
        sampler = trainer.runtime.engines["rollout"].pool.workers[0].process.popen.pid
        given = Path(f"/proc/{sampler}/environ").read_bytes().split(b"\0")
        assert f"OMP_NUM_THREADS={chosen or 2}".encode() in given
        assert torch.get_num_threads() == (4 if chosen else 2)
        trainer.close()
        assert torch.get_num_threads() == 4
        assert os.environ.get("OMP_NUM_THREADS") == chosen
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.weights": "auto"}, ["actor's own module", "[rollout.process]", 'rollout.weights = "own"']),
        ({"runtime.local.offload_idle_roles": True}, ["runtime.local.offload_idle_roles", "separate pools"]),
        ({"rollout.over_sampling": 1.5}, ["rollout.over_sampling", "no step waits for a straggler"]),
        ({"schedule": {"rollout.temperature": [[2, 0.5]]}}, ["schedule.'rollout.temperature'", "max_staleness = 0"]),
    ],
)  # fmt: skip
def test_what_cannot_run_ahead_is_refused_before_anything_starts(grpo, changes, words):
    said = refused(grpo, changes)
    assert all(word in said for word in words), said


def test_the_same_is_not_refused_where_nothing_runs_ahead(grpo):
    AsyncTrainer(
        load_config(overrides=grpo | {"trainer": "async", "async.max_staleness": 0}), rewards=[digits]
    )


def test_a_greedy_baseline_is_refused(grpo):
    run = AsyncTrainer(
        load_config(overrides=grpo | AHEAD | {"algorithm.advantage": "remax"}), rewards=[digits]
    )
    with pytest.raises(ConfigError, match=r"'remax' compares with a greedy response"):
        run.train()


def test_a_failure_of_the_sampler_ends_the_run_with_its_cause(train, monkeypatch):
    from engine_plugin_hf_rollout.engine import HFRolloutEngine

    step, calls = HFRolloutEngine.step, []

    def breaking(self):
        calls.append(1)
        if len(calls) > 6:
            raise ZeroDivisionError("the sampler broke")
        return step(self)

    monkeypatch.setattr(HFRolloutEngine, "step", breaking)
    with pytest.raises(PluginError, match=r"trainer 'async' failed: ZeroDivisionError: the sampler broke"):
        train("broken", AHEAD)
    assert threads() == set()


@pytest.mark.slow
def test_it_learns_as_much_as_the_synchronous_run(grpo):
    """The task of ``test_learning``: answer in digits, with its bounds."""
    short = {
        "run.steps": 16,
        "data.prompts_per_step": 8,
        "algorithm.mini_batch_prompts": 4,
        "rollout.group_size": 8,
        "rollout.max_response_tokens": 4,
        "actor.optim.lr": 1e-2,
        "tracking.rollouts_every_steps": 0,
        "checkpoint.at_end": False,
    }
    ends = {}
    for name, kind, more in (("sync", Trainer, {"rollout.weights": "own"}), ("async", AsyncTrainer, AHEAD)):
        run = kind(load_config(overrides=grpo | short | more | {"run.name": name}), rewards=[digits])
        run.train()
        run.close()
        lines = result_of(run.folder.path)["lines"]
        ends[name] = [line["reward/mean"] for line in lines]
        assert ends[name][0] < 0.1
    assert sum(ends["async"][-3:]) / 3 > 0.5
    assert sum(ends["sync"][-3:]) / 3 > 0.5
    assert max(line["async/staleness_max"] for line in lines) == 1


def test_after_ten_steps_the_log_says_what_would_make_it_quicker(train, caplog):
    _, _, found = train("advised", AHEAD | {"run.steps": 10, "rollout.max_response_tokens": 2})
    said = [record.message for record in caplog.records if record.message.startswith("Advice (step_time): ")]
    assert len(said) == 1
    assert "One after the other would take" in said[0]
    assert said[0].startswith(
        f"Advice (step_time): {advice(found['lines'])} See 'step_time' on the page 'Health' of the documentation."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        {"rollout.process": {}, "rollout.weights": "auto"},
        {"placement.pools": {"train": 1, "serve": 1}, "placement.actor": "train", "placement.rollout": "serve"},
    ],
    ids=["a process beside the worker", "pools of their own"],
)  # fmt: skip
def test_workers_in_processes_run_ahead_too(grpo, where):
    changes = {"runtime.backend": "torchrun", "run.steps": 4, "tracking.rollouts_every_steps": 1}
    reward = {"name": "length", "workers": 1, "length": {"max_tokens": 8, "buffer_tokens": 4}}
    run = AsyncTrainer(load_config(overrides={**grpo, **AHEAD, **changes, **where, "reward": [reward]}))
    run.train()
    run.close()
    found = result_of(run.folder.path)
    seen = [sample[0] for step in found["samples"] for sample in step]
    assert sorted(seen) == sorted(f"{s}:{g}:{i}" for s in range(1, 5) for g in range(4) for i in range(4))
    assert max(line["async/staleness_max"] for line in found["lines"]) == 1
    for line in found["lines"]:
        assert fresh_gap(line) < 1e-4
    assert threads() == set()


class Slow:
    """A sampler that has always something under way when the weights change: it stands still while the trainer trains."""

    def __init__(self, monkeypatch):
        from engine_plugin_hf_rollout.engine import HFRolloutEngine
        from engine_plugin_trainers.ahead_groups import AheadGroups

        self.goes_on, self.between = threading.Event(), []
        self.goes_on.set()
        step, wait, sync = HFRolloutEngine.step, AheadGroups.take, AsyncTrainer.push_weights

        def stepping(engine):
            found = step(engine)
            if engine.num_unfinished and engine._decoding is not None:
                self.between.append(engine.version)
                self.goes_on.wait(5)  # a step's end: the update comes now
            return found

        def waiting(source, *args):
            self.goes_on.set()
            groups = wait(source, *args)
            self.goes_on.clear()
            return groups

        def syncing(source, updated=True):
            self.goes_on.set()
            return sync(source, updated)

        monkeypatch.setattr(HFRolloutEngine, "step", stepping)
        monkeypatch.setattr(AheadGroups, "take", waiting)
        monkeypatch.setattr(AsyncTrainer, "push_weights", syncing)


@pytest.mark.parametrize("how", ["keep", "abort", "drain"])
def test_responses_under_way_go_on_with_new_weights_or_are_waited_for(train, monkeypatch, how):
    slow = Slow(monkeypatch)
    changes = {
        "async.weight_updates": how,
        "async.max_staleness": 2,
        "run.steps": 6,
        "rollout.hf.tokens_per_step": 1,
        "rollout.max_response_tokens": 16,
    }
    _, _, found = train(how, AHEAD | changes)
    versions = [sample[3] for step in found["samples"] for sample in step]
    mixed = sum(len(set(each)) > 1 for each in versions)
    kept = sum(line["async/kept_tokens"] for line in found["lines"])
    assert bool(slow.between) == (how != "drain")  # steps that end before their responses
    assert bool(mixed) == (how != "drain")
    assert bool(kept) == (how == "abort")
    assert all(0 <= line["time/sync_wait"] <= line["time/sync"] for line in found["lines"][:-1])
    assert all(each == sorted(each) for each in versions)
    for line in found["lines"]:  # each token is of the version that it says
        assert fresh_gap(line) < 1e-4
