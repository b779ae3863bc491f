"""The recurrent model, its engine and its sampler against slow independent values."""

import json
from dataclasses import replace

import pytest
import torch

from engine_core.config import ModelConfig, OptimConfig, RoleConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import DataError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, Prompt, Request, Sampling
from engine_plugin_custom_model.engine import GRUEngine
from engine_plugin_custom_model.plugin import GRUOptions
from engine_plugin_custom_model.sampler import GRUSampler

SIZES = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2}
EOS = 1


class Letters:
    """As much of a tokenizer as the sampler uses."""

    eos_token_id = EOS

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids)


@pytest.fixture
def context():
    plugins = PluginSet.load({"train_engines": {"gru"}})
    return WorkerContext(plugins, "actor", torch.device("cpu"), total_steps=4, live={"tokenizer": Letters()})


@pytest.fixture
def engine(context, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    config = RoleConfig(
        backend="gru",
        options=GRUOptions(),
        optim=OptimConfig(lr=0.4, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
    )
    return GRUEngine(config, ModelConfig(path=str(tmp_path)), context)


@pytest.fixture
def sampler(context, engine):
    made = GRUSampler(RolloutConfig(backend="gru"), ModelConfig(), context)
    made.share_module(engine)
    return made


def requests(sampling, count=3):
    return [Request(f"r{i}", Prompt(f"p{i}", [2 + i, 3, 4], ""), sampling, index=i) for i in range(count)]


def log_probs_one_token_at_a_time(engine, ids):
    """log p of each token given those before it, from a forward pass of each prefix in float64."""
    module = engine.module.double()
    rows = [module(torch.tensor([ids[:n]]))[0, -1].log_softmax(-1) for n in range(1, len(ids))]
    found = [0.0, *(float(row[token]) for row, token in zip(rows, ids[1:], strict=True))]
    module.float()
    return found


def test_log_probs_of_packed_sequences_are_those_of_each_alone(engine):
    sequences = [[5, 6, 7, 8, 1], [9, 10, 1], [11, 12, 13, 14]]
    lengths = torch.tensor([len(s) for s in sequences])
    ids = torch.tensor([token for s in sequences for token in s])
    batch = Batch(ids, lengths, {"loss_mask": torch.ones(len(ids), dtype=torch.bool)})
    with torch.no_grad():
        found = engine.infer(batch, ["log_probs"])["log_probs"]
        expected = [value for s in sequences for value in log_probs_one_token_at_a_time(engine, s)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_embedding_has_a_quarter_of_the_rate(engine):
    embedding, matrices, biases = engine.optimizer.param_groups
    assert [id(p) for p in embedding["params"]] == [id(engine.module.embed.weight)]
    assert embedding["lr"] == pytest.approx(0.1)
    assert [group["lr"] for group in (matrices, biases)] == pytest.approx([0.4, 0.4])
    engine.set_lr(0.8)
    assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([0.2, 0.8, 0.8])


def test_every_setting_of_the_optimizer_reaches_every_group(engine):
    groups = engine.optimizer.param_groups
    assert [(group["betas"], group["eps"]) for group in groups] == [((0.8, 0.9), 1e-4)] * 3
    for group, decay, dimensions in zip(groups, (0.1, 0.1, 0.0), (2, 2, 1), strict=True):
        assert group["weight_decay"] == decay
        assert {p.ndim for p in group["params"]} == {dimensions}
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in engine.module.parameters())


def test_a_resumed_engine_has_the_weights_and_the_rates(engine, context, tmp_path):
    engine.save(tmp_path / "state").result()
    other = GRUEngine(engine.config, engine.model_config, context)
    other.module.embed.weight.data.zero_()
    other.load(tmp_path / "state")
    assert torch.equal(other.module.embed.weight, engine.module.embed.weight)
    assert [group["lr"] for group in other.optimizer.param_groups] == pytest.approx([0.1, 0.4, 0.4])


def test_an_export_is_a_folder_that_the_engine_builds_from(engine, context, tmp_path):
    engine.export(tmp_path / "out")
    again = GRUEngine(engine.config, ModelConfig(path=str(tmp_path / "out"), seed=7), context)
    assert torch.equal(again.module.gru.weight_hh_l1, engine.module.gru.weight_hh_l1)


def test_the_sampler_tells_the_log_probs_of_the_trainer(engine, sampler):
    for rollout in sampler.generate(requests(Sampling(max_response_tokens=12, seed=3))):
        with torch.no_grad():
            expected = log_probs_one_token_at_a_time(engine, rollout.token_ids.tolist())
        assert rollout.rollout_log_probs[3:].tolist() == pytest.approx(expected[3:], abs=1e-5)
        assert rollout.loss_mask.tolist() == [False] * 3 + [True] * rollout.response_length


def test_a_request_with_a_seed_gives_the_same_tokens_whatever_else_is_sampled(sampler):
    asked = requests(Sampling(max_response_tokens=12, seed=5))
    together = sampler.generate(asked)
    alone = sampler.generate(asked[2:])
    assert together[2].token_ids.tolist() == alone[0].token_ids.tolist()


def test_requests_without_a_seed_differ(sampler):
    one, two = sampler.generate([*requests(Sampling(max_response_tokens=20), 1), Request("x", Prompt("p", [2, 3, 4], ""), Sampling(max_response_tokens=20))])  # fmt: skip
    assert one.token_ids.tolist() != two.token_ids.tolist()


def test_a_sampler_with_weights_of_its_own_follows_each_update(engine, context, sampler):
    given = replace(context, role="rollout", actor="gru")
    own = GRUSampler(RolloutConfig(backend="gru"), engine.model_config, given)
    for version in (0, 1):
        own.update_weights(engine.named_weights(), version)
        mine, theirs = (
            made.generate(requests(Sampling(max_response_tokens=12, seed=3))) for made in (own, sampler)
        )
        assert [r.token_ids.tolist() for r in mine] == [r.token_ids.tolist() for r in theirs]
        assert {int(version) for r in mine for version in r.policy_versions[r.loss_mask]} == {version}
        engine.module.embed.weight.data.mul_(2.0)
    with pytest.raises(DataError, match=r"2 of 9 weights did not come"):
        own.update_weights(list(engine.named_weights())[2:], 2)


def test_greedy_takes_the_likeliest_token(engine, sampler):
    (rollout,) = sampler.generate(requests(Sampling(temperature=0, max_response_tokens=1), 1))
    with torch.no_grad():
        best = int(engine.module(torch.tensor([[2, 3, 4]]))[0, -1].argmax())
    assert rollout.token_ids.tolist() == [2, 3, 4, best]
