"""Runs whose workers are processes: the same as in one process, whatever the number of ranks."""

import json
import os
from pathlib import Path

import psutil
import pytest
import torch

from engine_core import load_config
from engine_core.config.completeness import check_complete
from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError, DataError
from engine_core.local.engine_host import EngineHost, RankPlacement
from engine_core.runs.checkpoint import Checkpoints, problems
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.trainer import Trainer
from engine_core.types import Batch, LossCall, Prompt, Request, Sampling
from engine_plugin_processes.codec import encode
from engine_plugin_processes.torchrun import TorchrunRuntime

pytestmark = pytest.mark.usefixtures("forked_workers")

DATA_PARALLEL = Path(__file__).parents[1] / "conformance" / "data_parallel_plugin.py"
TORCHRUN = {"runtime.backend": "torchrun"}
TWO = {**TORCHRUN, "runtime.torchrun.processes": 2, "actor.backend": "data_parallel"}
TIMED = ("time", "throughput/", "memory/", "sync/")


@pytest.fixture
def settings(grpo, digits_plugin):
    """A run of two steps with two updates each, a reference, an evaluation and a checkpoint."""
    return grpo | {
        "plugins": [str(digits_plugin), str(DATA_PARALLEL)],
        "reward": [{"name": "digits", "workers": 0}],
        "algorithm.mini_batch_prompts": 2,
        "algorithm.kl_coef": 0.1,
        "algorithm.ref_refresh_steps": 1,
        "algorithm.ref_refresh_mix": 0.5,
        "eval.every_steps": 2,
        "checkpoint.every_steps": 1,
    }


def config_of(settings, **changes):
    return load_config({**settings, **changes}, allow_code=True)


def train(settings, changes):
    trainer = Trainer(load_config({**settings, **changes}, allow_code=True))
    trainer.train()
    trainer.close()
    return result_of(trainer.folder.path)


def result_of(run):
    """Metrics without times, samples, and the hashes of the newest checkpoint's files."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = {
        file.name: [(r.request_id, r.token_ids.tolist(), r.reward) for r in read_rollouts(file)]
        for file in sorted((run / "rollouts").rglob("*.parquet"))
    }
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.path(checkpoints.steps()[-1])
    assert problems(newest) == []
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines],
        "samples": samples,
        "files": {name: entry for name, entry in files.items() if name != "state.json"},
    }


def test_one_process_is_the_local_run_bit_for_bit(settings):
    local = train(settings, {"run.name": "local"})
    assert train(settings, {"run.name": "one", **TORCHRUN}) == local
    assert len(local["metrics"]) == 2
    assert {name.split("/")[0] for name in local["files"]} == {"actor", "ref"}


@pytest.mark.parametrize("backend", ["data_parallel", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["auto", pytest.param("own", marks=pytest.mark.slow)])
def test_two_ranks_sample_and_learn_the_same(settings, backend, weights):
    """With the actor's module for the sampler, and with a copy."""
    settings["rollout.weights"] = weights
    local = train(settings, {"run.name": "local"})
    two = train(settings, {"run.name": "two", **TWO, "actor.backend": backend})
    assert two["samples"] == local["samples"]
    for mine, theirs in zip(two["metrics"], local["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        # Adam makes much of the order of sums where a gradient is nearly 0: later steps are near, not equal
        near = 1e-6 if mine["step"] == 1 else 1e-3
        for name in {
            "actor/loss",
            "actor/grad_norm",
            "actor/lr",
            "reward/mean",
            "eval/reward_mean",
        } & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=near), name
    assert mine["actor/loss"] != 0


@pytest.mark.parametrize(
    "transport",
    [
        "auto",
        pytest.param("broadcast", marks=pytest.mark.slow),
        pytest.param("ipc", marks=pytest.mark.slow),
    ],
)
def test_roles_in_pools_of_their_own_train_as_in_one(settings, transport):
    """The sampler and the reference lie in other processes than the actor; weights go there as the transport does it."""
    local = train(settings, {"run.name": "local", "rollout.weights": "own"})
    pools = {"placement.pools": {"train": 1, "serve": 1}, "placement.actor": "train"}
    pools |= {"placement.rollout": "serve", "placement.ref": "serve", "rollout.transport": transport}
    assert train(settings, {"run.name": "pools", **TORCHRUN, **pools}) == local


# -- one launch of two ranks, many cases -------------------------------------------------------


@pytest.fixture(scope="module")
def crew(world, digits_plugin):
    """Actor, reference and sampler on two ranks: the runtime, its groups, and the same engines in this process."""
    settings = {
        "plugins": [str(digits_plugin), str(DATA_PARALLEL)],
        "model.path": str(world / "model"),
        "reward": [{"name": "digits"}],
        "data.train": str(world / "data" / "train.jsonl"),
        "actor.max_tokens_per_rank": 40,
        "rollout.hf.batch_size": 4,
        "rollout.weights": "own",
        **TWO,
    }
    config = load_config(settings, allow_code=True)
    trainer = Trainer(config)
    trainer.load_inputs()
    roles = {"actor": Role("train"), "ref": Role("train", trainable=False), "rollout": Role("rollout")}
    live = {"tokenizer": trainer.tokenizer}
    runtime = TorchrunRuntime(config, trainer.plugins, live)
    groups = runtime.start(roles, 4)
    alone = load_config({**settings, "actor.backend": "torch"}, allow_code=True)
    host = EngineHost(alone, Trainer(alone).plugins, live, RankPlacement(torch.device("cpu")))
    host.build(roles, 4)
    yield runtime, groups, host.engines
    children = [worker.process.popen for worker in runtime.crew.workers.values()]
    host.close()
    runtime.close()
    trainer.close()
    assert [child.returncode for child in children] == [0, 0]


def sequences(count=7):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, 20, (count,), generator=generator)
    total = int(lengths.sum())
    batch = Batch(torch.randint(5, 60, (total,), generator=generator), lengths)
    mask = torch.ones(total, dtype=torch.bool)
    mask[batch.offsets[:-1]] = False
    share = mask / mask.sum()
    return batch.with_columns(tokens={"loss_mask": mask, "weights": share, "token_share": share})


def requests(count, tag):
    return [
        Request(f"{tag}:{i}", Prompt(f"p:{i // 2}", [7 + i // 2, 9, 11], "", {"i": i}), Sampling(max_response_tokens=3 + i, seed=i), i // 2, i % 2)
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [7, 1], ids=["seven sequences", "fewer sequences than ranks"])
def test_values_per_token_are_those_of_one_process(crew, count):
    _, groups, alone = crew
    batch = sequences(count)
    for role in ("actor", "ref"):
        found = groups[role].call("infer", batch, outputs=("log_probs", "entropy")).result()
        expected = alone[role].infer(batch, ("log_probs", "entropy"))
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)


def test_gradients_of_all_ranks_make_one_step_and_weights_are_the_same_again(crew):
    _, groups, alone = crew
    batch = sequences()
    output = groups["actor"].call("forward_backward", batch, loss=LossCall("nll")).result()
    expected = alone["actor"].forward_backward(batch, LossCall("nll"))
    assert output.loss == pytest.approx(expected.loss, rel=1e-6)
    done, wanted = groups["actor"].call("optimizer_step").result(), alone["actor"].optimizer_step()
    assert done.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
    assert done.lr == wanted.lr


def test_every_rank_is_given_its_own_sequences_and_with_all_the_whole_batch(crew):
    runtime, groups, alone = crew
    batch = sequences()
    sent = []
    original = runtime.crew.send
    runtime.crew.send = lambda messages, *rest, **more: (
        sent.append(messages) or original(messages, *rest, **more)
    )
    try:
        groups["actor"].call("infer", batch, outputs=("log_probs",)).result()
        whole = groups["actor"].call("infer", batch, split="all", outputs=("log_probs",)).result()
    finally:
        del runtime.crew.send
    shared, all_of_it = ([encode(m).payload_bytes for m in each.values()] for each in sent)
    assert sum(shared) < 1.2 * all_of_it[0]  # columns once in all, and not once a rank
    assert len(set(map(id, sent[1].values()))) == 1  # one encoding for both
    expected = alone["actor"].infer(batch, ("log_probs",))["log_probs"]
    torch.testing.assert_close(whole["log_probs"], expected, rtol=1e-5, atol=1e-5)


def test_samples_do_not_depend_on_the_number_of_ranks_and_come_in_order(crew):
    runtime, groups, alone = crew
    runtime.push_weights("actor", "rollout", 1)
    alone["rollout"].update_weights(alone["actor"].named_weights(), 1)
    asked = requests(9, "a")
    found = groups["rollout"].call("generate", requests=asked).result()
    expected = alone["rollout"].generate(asked)
    assert [r.request_id for r in found] == [r.id for r in asked]
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in expected]
    assert all(r.prompt is a.prompt for r, a in zip(found, asked, strict=True))
    assert {int(v) for r in found for v in r.policy_versions[r.loss_mask]} == {1}


def test_requests_that_are_added_are_sampled_step_by_step_and_can_be_aborted(crew):
    _, groups, _ = crew
    group = groups["rollout"]
    group.call("add", requests=requests(6, "b")).result()
    aborted = group.call("abort", ids=["b:0", "b:5"]).result()
    finished = group.call("step").result()
    assert {r.request_id for r in aborted} == {"b:0", "b:5"}
    assert {r.request_id for r in finished} == {f"b:{i}" for i in range(1, 5)}


def test_a_push_reaches_every_rank_and_says_what_moved(crew):
    runtime, _, alone = crew
    result = runtime.push_weights("actor", "rollout", 2)
    size = sum(t.numel() * t.element_size() for _, t in alone["actor"].named_weights())
    assert (result.version, result.bytes) == (2, 2 * size)
    assert len(result.checksum) == 32


def test_a_reference_is_mixed_on_every_rank(crew):
    runtime, groups, alone = crew
    runtime.mix_weights("actor", "ref", 0.5)
    alone["ref"].load_named_weights(alone["actor"].named_weights(), 0.5)
    batch = sequences()
    found = groups["ref"].call("infer", batch, outputs=("log_probs",)).result()["log_probs"]
    torch.testing.assert_close(
        found, alone["ref"].infer(batch, ("log_probs",))["log_probs"], rtol=1e-4, atol=1e-5
    )


def test_errors_come_back_as_themselves_and_the_workers_go_on(crew, tmp_path):
    _, groups, _ = crew
    with pytest.raises(DataError, match="missing: this is not a whole checkpoint"):
        groups["actor"].call("load", folder=tmp_path / "nothing").result()
    with pytest.raises(ValueError, match="Unknown output 'log_prob'") as caught:
        groups["actor"].call("infer", sequences(), outputs=("log_prob",)).result()
    assert "in worker" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="'_finish' is no method of TrainEngine"):
        groups["actor"].call("_finish").result()
    with pytest.raises(TypeError, match=r"A builtins\.object does not cross"):
        groups["actor"].call("save", folder=object())
    assert groups["actor"].call("mark").result() is None


def test_a_save_is_a_future_that_is_done_when_all_ranks_have_written(crew, tmp_path):
    _, groups, _ = crew
    groups["actor"].call("save", folder=tmp_path / "actor").result().result()
    assert {"weights.safetensors", "random-0.json", "random-1.json"} <= set(os.listdir(tmp_path / "actor"))
    groups["actor"].call("load", folder=tmp_path / "actor").result()


def test_who_stops_waiting_for_samples_stops_the_samplers_and_they_go_on(crew):
    _, groups, _ = crew
    long = [
        Request(f"c:{i}", Prompt("p", [7, 9], ""), Sampling(max_response_tokens=100, seed=i))
        for i in range(400)
    ]
    reply = groups["rollout"].call("generate", requests=long)
    reply._give_up()
    with pytest.raises(RuntimeError, match="Interrupted"):
        reply.result(60)
    assert len(groups["rollout"].call("generate", requests=requests(3, "d")).result()) == 3


def test_workers_are_children_with_no_port_of_the_run_open_to_others(crew):
    runtime, _, _ = crew
    for worker in runtime.crew.workers.values():
        process = psutil.Process(worker.process.popen.pid)
        assert process.ppid() == os.getpid()
        listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}


# -- what is refused before anything is started --------------------------------------------------


def refused(settings, changes):
    trainer = Trainer(load_config({**settings, **TORCHRUN, **changes}, allow_code=True))
    with pytest.raises(ConfigError) as caught:
        trainer.setup()
    trainer.close()
    return str(caught.value)


def test_placements_that_cannot_be_are_refused_with_their_keys(settings, monkeypatch):
    pools = {"placement.pools": {"a": 1, "b": 2}, "placement.actor": "a", "placement.rollout": "b"}
    with pytest.raises(ConfigError, match=r"placement.pools: \{ a = 1, b = 2 \} need 3 processes"):
        check_complete(config_of(settings, **{**TORCHRUN, **pools, "runtime.torchrun.processes": 2}))
    unused = {**pools, "placement.rollout": "a", "placement.critic": "b"}  # the run has no critic
    assert "pool 'b' serves no role" in refused(settings, unused)
    spare = {"runtime.torchrun.max_replacements": 1}
    assert (
        "runtime.torchrun.max_replacements: only a sampler in a separate pool can be replaced; here its processes serve"
        in refused(settings, {**TORCHRUN, **spare})
    )
    monkeypatch.setattr(TorchrunRuntime, "_can_replace", lambda runtime: False)
    assert "processes that another has started cannot be replaced" in refused(
        settings, {**pools, **spare, "placement.ref": "a"}
    )
    monkeypatch.setattr("engine_plugin_processes.runtime.default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert "placement.pools: 3 processes need an accelerator each, and this machine shows 2" in refused(
        settings, pools
    )
    with pytest.raises(ConfigError, match=r"expected a pool of placement\.pools"):
        check_complete(config_of(settings, **{**TORCHRUN, **pools, "placement.rollout": "c"}))


def test_a_model_from_python_is_refused(settings):
    trainer = Trainer(config_of(settings, **TORCHRUN), model=torch.nn.Linear(1, 1))
    trainer.live["model"] = torch.nn.Linear(1, 1)
    runtime = TorchrunRuntime(trainer.config, trainer.plugins, trainer.live)
    with pytest.raises(ConfigError, match="a model given from Python does not reach other processes"):
        runtime.start({"actor": Role("train")}, 1)
