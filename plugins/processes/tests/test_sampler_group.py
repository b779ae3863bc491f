"""Several engines in processes of their own behind one sampler: who gets what, losses, weights, refusals."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.config.roles import ProcessConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError, DataError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_processes.sampler_process.engine import SamplerEngine, devices
from engine_plugin_processes.transports import bucketing

pytestmark = pytest.mark.usefixtures("forked_workers")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """A file with a line for each process that was started."""
    return tmp_path_factory.mktemp("group") / "starts"


@pytest.fixture(scope="module")
def group(starts):
    """Two engines; every test goes on with the processes that the one before left."""
    plugins = PluginSet.load({"rollout_engines": {"counting"}}, ["counting_plugin.py"], HERE)
    options = plugins.spec("rollout_engines", "counting").config(starts=str(starts))
    config = RolloutConfig(backend="counting", options=options, process=ProcessConfig(engines=2))
    context = WorkerContext(plugins=plugins, role="rollout", device=torch.device("cpu"))
    made = SamplerEngine(config, ModelConfig(), context).build(config)
    yield made
    made.close()


def request(name, group, tokens, **columns):
    prompt = Prompt(f"train:{group}", [3, 4], "", columns)
    return Request(name, prompt, Sampling(max_response_tokens=tokens), group)


def weights(value):
    return iter([("a", torch.full((2,), float(value))), ("b", torch.full((3,), float(value)))])


def sampled_by(rollouts):
    """Process of each rollout."""
    return {rollout.request_id: int(rollout.extras["pid"][0]) for rollout in rollouts}


def processes(group):
    return [worker.process.popen.pid for _, worker in sorted(group.pool.workers.items())]


def test_requests_go_where_the_fewest_tokens_are_left_and_those_of_a_prompt_stay_together(group):
    first, second = processes(group)
    asked = [request(f"long{i}", 0, 100) for i in range(3)]
    asked += [request(f"short{i}", 1 + i // 2, 40) for i in range(6)]
    for members in (asked[:3], *(asked[i : i + 2] for i in (3, 5, 7))):
        for member in members:
            member.prompt = members[0].prompt
    group.add(asked[:-1])
    group.add([request("late", 9, 10), request("later", 10, 10)])
    assert group.num_unfinished == 10
    with pytest.raises(ValueError, match=r"Request 'late' is queued already\. Request ids must be distinct"):
        group.add([request("other", 11, 1), request("late", 12, 1)])
    assert [r.finish_reason for r in group.abort(["late", "unknown"])] == ["abort"]
    done = []
    while group.num_unfinished:
        done += group.step()
    expected = {f"long{i}": first for i in range(3)} | {f"short{i}": second for i in range(5)}
    assert sampled_by(done) == expected | {"later": second}
    assert group.step() == []


def everyone(group):
    """Processes, once each that was lost is replaced."""
    deadline = time.monotonic() + 60
    while len(group._present()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return processes(group)


def test_one_process_that_is_killed_is_started_again_and_the_other_answers_what_it_had_once(
    group, starts, tmp_path
):
    before = processes(group)
    assert group.update_weights(weights(3), 3) == group.update_weights(weights(3), 3)
    asked = [request(f"r{i}", i, 10) for i in range(6)]
    asked[2].prompt.columns.update(do="kill", flag=str(tmp_path / "flag"))
    rollouts = group.generate(asked)
    assert [r.request_id for r in rollouts] == [r.id for r in asked]
    assert all(r.prompt is a.prompt for r, a in zip(rollouts, asked, strict=True))
    by = sampled_by(rollouts)
    assert [by[f"r{i}"] for i in range(6)] == [before[0], *[before[1]] * 5]
    after = everyone(group)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert {int(line) for line in starts.read_text().split()} == {*before, after[0]}
    rollouts += group.generate([request(f"s{i}", i, 10) for i in range(2)])
    assert sampled_by(rollouts[-2:]) == {"s0": after[0], "s1": after[1]}
    assert {tuple(r.policy_versions.tolist()) for r in rollouts} == {(3, 3, 3, 3)}
    assert {r.rollout_log_probs[-1].item() for r in rollouts} == {-3.0}


def test_weights_reach_all_also_one_that_is_lost_half_way_and_no_mixture_is_sampled_from(group, monkeypatch):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)  # a bucket for each tensor
    before = processes(group)

    def breaks():
        yield next(weights(4))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        group.update_weights(breaks(), 4)
    with pytest.raises(DataError, match="weights of two versions"):
        group.generate([request("r", 0, 1)])

    def dies():
        stream = weights(5)
        yield next(stream)
        os.kill(before[1], signal.SIGKILL)
        yield from stream

    group.update_weights(dies(), 5)
    after = everyone(group)
    assert after[0] == before[0]
    assert after[1] != before[1]
    rollouts = group.generate([request(f"r{i}", i, 10) for i in range(2)])
    assert sampled_by(rollouts) == {"r0": after[0], "r1": after[1]}
    assert {r.rollout_log_probs[-1].item() for r in rollouts} == {-5.0}


def test_devices_that_are_not_there_are_refused(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda:1")
    assert devices(cpu, 3, 2) == [cpu] * 3
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert devices(cuda, 3, 1) == [torch.device("cuda", i) for i in (1, 2, 3)]
    with pytest.raises(
        ConfigError, match=r"engines = 4: each needs its own device, and from cuda:1 on there are 3"
    ):
        devices(cuda, 4, 1)
    with pytest.raises(ConfigError, match=r"engines = 2: each of the pool's 2 processes has one device"):
        devices(cuda, 2, 2)
