"""Sampling from a sharded actor: two ranks of one launch, beside the same engines in this process."""

import itertools
import json

import pytest
import torch

from engine_core import load_config
from engine_core.contracts.runtime import Role
from engine_core.contracts.weight_names import own_weights
from engine_core.local.engine_host import EngineHost, RankPlacement
from engine_core.train.trainer import Trainer
from engine_core.types import Batch, LossCall, Prompt, Request, Sampling
from engine_plugin_processes.torchrun import TorchrunRuntime
from engine_plugin_testing import reference

ROLES = {"actor": Role("train"), "ref": Role("train", trainable=False), "rollout": Role("rollout")}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    made = tmp_path_factory.mktemp("run")
    reference.write_model(made / "model", {}, 0, True)
    (made / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return {
        "model.path": str(made / "model"),
        "data.train": str(made / "train.jsonl"),
        "reward": [{"name": "numeric"}],
        "actor.max_tokens_per_rank": 60,
        "actor.optim.lr": 1e-2,
        "actor.optim.eps": 1e-3,  # else a step makes much of the rounding of gradients that are nearly 0
        "rollout.hf.batch_size": 4,
    }


@pytest.fixture(scope="module")
def crew(settings):
    """Actor, reference and sampler on two ranks, the actor sharded; the same roles here, unsharded, with a copy for the sampler."""
    sharded = {"actor.backend": "fsdp", "runtime.backend": "torchrun", "runtime.torchrun.processes": 2}
    trainer = Trainer(load_config({**settings, **sharded}))
    trainer.load_inputs()
    live = {"tokenizer": trainer.tokenizer}
    runtime = TorchrunRuntime(trainer.config, trainer.plugins, live)
    groups = runtime.start(ROLES, 4)
    alone = load_config({**settings, "rollout.weights": "own"})
    host = EngineHost(alone, Trainer(alone).plugins, live, RankPlacement(torch.device("cpu")))
    host.build(ROLES, 4)
    yield runtime, groups, host
    host.close()
    runtime.close()
    trainer.close()


def requests(count, tag, longest=12):
    """Prompts of 1 to 5 tokens, two requests each, and answers of very different lengths."""
    return [
        Request(
            f"{tag}:{i}",
            Prompt(f"p:{i // 2}", [(7 + i + j) % 90 + 2 for j in range(1 + i // 2 % 5)], ""),
            Sampling(max_response_tokens=1 + (5 * i) % longest, seed=i),
            i // 2,
            i % 2,
        )
        for i in range(count)
    ]


def sequences(count=7):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, 20, (count,), generator=generator)
    total = int(lengths.sum())
    batch = Batch(torch.randint(5, 60, (total,), generator=generator), lengths)
    mask = torch.ones(total, dtype=torch.bool)
    mask[batch.offsets[:-1]] = False
    share = mask / mask.sum()
    return batch.with_columns(tokens={"loss_mask": mask, "weights": share, "token_share": share})


def same(found, expected):
    assert [r.request_id for r in found] == [r.request_id for r in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist(), mine.request_id
        torch.testing.assert_close(mine.rollout_log_probs, theirs.rollout_log_probs, rtol=1e-5, atol=1e-5)
        assert mine.finish_reason == theirs.finish_reason


def one_step(runtime, groups, host, version):
    """The same optimizer step there and here; both samplers follow."""
    batch = sequences()
    groups["actor"].call("forward_backward", batch, loss=LossCall("nll")).result()
    host.engines["actor"].forward_backward(batch, LossCall("nll"))
    done, wanted = groups["actor"].call("optimizer_step").result(), host.engines["actor"].optimizer_step()
    assert done.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    moved = runtime.push_weights("actor", "rollout", version)
    assert (moved.bytes, moved.checksum) == (0, "shared")
    host.push_weights("actor", "rollout", version)


@pytest.mark.parametrize("count", [1, 7, 23], ids=["one rank has none", "one batch", "several batches"])
def test_the_same_is_sampled_as_in_one_process(crew, count):
    _, groups, host = crew
    asked = requests(count, f"a{count}")
    found = groups["rollout"].call("generate", requests=asked).result()
    same(found, host.engines["rollout"].generate(asked))
    assert all(r.prompt is a.prompt for r, a in zip(found, asked, strict=True))


def test_samples_follow_each_step_and_training_is_not_disturbed_by_sampling(crew):
    runtime, groups, host = crew
    for version in (1, 2):
        one_step(runtime, groups, host, version)
        asked = requests(9, f"b{version}")
        found = groups["rollout"].call("generate", requests=asked).result()
        same(found, host.engines["rollout"].generate(asked))
        assert {int(v) for r in found for v in r.policy_versions[r.loss_mask]} == {version}


def test_whole_weights_are_there_while_samples_are_drawn_and_no_longer(crew):
    runtime, groups, _ = crew
    groups["actor"].call("mark").result()
    told = []
    send = runtime.crew.send
    runtime.crew.send = lambda messages, what, *rest, **more: (
        told.append(what[1]) or send(messages, what, *rest, **more)
    )
    try:
        groups["rollout"].call("generate", requests=requests(2, "c")).result()
        groups["rollout"].call("generate", requests=requests(2, "d")).result()
        groups["ref"].call("infer", sequences(), outputs=("log_probs",)).result()
        groups["actor"].call("mark").result()
        groups["rollout"].call("generate", requests=requests(2, "e")).result()
        with runtime.phase("train"):
            pass
    finally:
        del runtime.crew.send
    lent = ["lend", "generate", "take_back"]
    assert [what for what, _ in itertools.groupby(told)] == [*lent, "infer", "mark", *lent]


def test_requests_that_come_one_by_one_are_sampled_and_can_be_dropped(crew):
    _, groups, host = crew
    asked = requests(6, "f")
    found = groups["rollout"].call("advance", requests=asked[:4]).result()
    found += groups["rollout"].call("advance", requests=asked[4:], dropped=[]).result()
    while len(found) < 6:
        found += groups["rollout"].call("advance").result()
    expected = host.engines["rollout"].generate(asked)
    same(sorted(found, key=lambda r: r.request_id), sorted(expected, key=lambda r: r.request_id))


def test_who_stops_waiting_for_samples_stops_all_samplers_and_training_goes_on(crew):
    runtime, groups, host = crew
    long = [
        Request(f"g:{i}", Prompt("p", [7, 9], ""), Sampling(max_response_tokens=90, seed=i))
        for i in range(400)
    ]
    reply = groups["rollout"].call("generate", requests=long)
    reply.give_up()
    with pytest.raises(RuntimeError, match="Interrupted"):
        reply.result(60)
    one_step(runtime, groups, host, 3)
    asked = requests(5, "h")
    same(groups["rollout"].call("generate", requests=asked).result(), host.engines["rollout"].generate(asked))


def test_after_sampling_the_shards_are_the_weights_of_the_run_in_one_process(crew, tmp_path):
    _, groups, host = crew
    groups["rollout"].call("generate", requests=requests(3, "i")).result()
    groups["actor"].call("export", folder=tmp_path / "whole").result()
    from transformers import AutoModelForCausalLM

    exported = own_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"))
    for name, value in own_weights(host.engines["actor"].module).items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=1e-4)
