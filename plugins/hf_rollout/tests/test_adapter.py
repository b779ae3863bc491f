"""The adapter of a LoRA run alone, into a base that the sampler keeps: what merged weights would give."""

import copy

import pytest
import torch

from engine_core.config import ModelConfig, OptimConfig, RoleConfig, RolloutConfig
from engine_core.config.roles import LoRAConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.contracts.weight_names import base_weights
from engine_core.contracts.weight_sync import same_process
from engine_core.errors import DataError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions

pytest.importorskip("peft")
CPU = torch.device("cpu")


def context(role, **live):
    plugins = PluginSet.load({"train_engines": {"torch"}, "rollout_engines": {"hf"}})
    return WorkerContext(plugins=plugins, role=role, device=CPU, total_steps=10, live=live)


@pytest.fixture
def sampler(make_model, tokenizer):
    def make(**options):
        config = RolloutConfig(options=HFOptions(**options))
        live = {"tokenizer": tokenizer, "model": make_model(seed=0)}
        return HFRolloutEngine(config, ModelConfig(), context("rollout", **live))

    return make


@pytest.fixture
def actor(make_model):
    def make(model=None, **lora):
        lora = {"rank": 4, "rslora": True, "target_modules": ["q_proj", "down_proj"], **lora}
        config = RoleConfig(
            optim=OptimConfig(lr=0.1), options=TorchOptions(device="cpu"), lora=LoRAConfig(**lora)
        )
        engine = TorchEngine(config, ModelConfig(), context("actor", model=model or make_model(seed=0)))
        learn(engine, 1)
        return engine

    return make


def learn(engine, seed):
    """Another adapter, as a step makes it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in engine.named_weights(adapter=True):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)


def test_it_samples_what_merged_weights_sample_update_after_update(sampler, actor, make_requests, ragged):
    trained, alone, merged = actor(), sampler(adapter=True), sampler()
    base = copy.deepcopy(base_weights(alone._module()))
    requests = make_requests(ragged)
    seen = []
    for version in (1, 2):
        learn(trained, version)
        moved = same_process(trained, alone, version, shared=False, adapter=True)
        whole = same_process(trained, merged, version, shared=False)
        assert moved.bytes < whole.bytes / 4
        one_model = dict(alone._adapter._adapter.merged())
        for name, tensor in trained.named_weights():
            assert torch.allclose(one_model[name], tensor, rtol=0, atol=1e-6)
        for mine, theirs in zip(alone.generate(requests), merged.generate(requests), strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            # nats; of about 5, where float32 itself has steps of 5e-7
            assert torch.allclose(mine.rollout_log_probs, theirs.rollout_log_probs, rtol=1e-6, atol=1e-6)
            assert bool((mine.policy_versions[mine.loss_mask] == version).all())
            seen.append(mine.rollout_log_probs.tolist())
    assert seen[: len(requests)] != seen[len(requests) :]  # the second update was another adapter
    now = base_weights(alone._module())
    assert now.keys() == base.keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())


def test_whole_weights_are_refused_with_the_key_and_nothing_is_sampled_then(sampler, actor, make_requests):
    trained, alone = actor(), sampler(adapter=True)
    with pytest.raises(DataError, match=r"update to version 1 is no adapter: .*rollout\.hf\.adapter"):
        same_process(trained, alone, 1, shared=False)
    assert alone.version == 0
    alone.add(make_requests([[5, 6]]))
    with pytest.raises(DataError, match="did not come to its end"):
        alone.step()


def test_an_adapter_that_lacks_a_tensor_is_refused_until_a_whole_one_came(sampler, actor, make_requests):
    trained, alone = actor(), sampler(adapter=True)
    same_process(trained, alone, 1, shared=False, adapter=True)
    from engine_core.contracts.weight_sync import stream_of

    with pytest.raises(DataError, match="did not come"):
        alone.update_weights(list(stream_of(trained, True))[:-1], 2)
    alone.add(make_requests([[5, 6]]))
    with pytest.raises(DataError, match="did not come to its end"):
        alone.step()
    same_process(trained, alone, 3, shared=False, adapter=True)
    assert len(alone.step()) == 1


def test_another_adapter_than_the_first_is_refused(sampler, actor):
    alone = sampler(adapter=True)
    same_process(actor(), alone, 1, shared=False, adapter=True)
    with pytest.raises(DataError, match="another adapter than those before"):
        same_process(actor(rank=2), alone, 2, shared=False, adapter=True)
