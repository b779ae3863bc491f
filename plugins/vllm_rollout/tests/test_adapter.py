"""The adapter of a LoRA run alone into vLLM: the log-probs of merged weights, over updates and in the midst of responses."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from engine_core import load_config
from engine_core.config import ModelConfig, RoleConfig, RolloutConfig
from engine_core.config.roles import LoRAConfig, OptimConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.contracts.weight_sync import ADAPTER_CONFIG, stream_of
from engine_core.errors import ConfigError, DataError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.train.trainer import Trainer
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_testing.reference import logits_of, tokenizer, write_model
from engine_plugin_vllm_rollout import adapter as adapter_module
from engine_plugin_vllm_rollout.adapter import AdapterUpdater
from engine_plugin_vllm_rollout.plugin import VLLMOptions

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 16,
    "sleep_level": 0,
    "kv_cache_memory_bytes": 1 << 26,
    "adapter": True,
}
# of a log-prob in float32, in nats: base and product are added after their matrices, not before
TOLERANCE = 5e-5


def actor(path, rank=4):
    """A train engine with an adapter that changes the model a lot."""
    plugins = PluginSet.load({"train_engines": {"torch"}})
    config = RoleConfig(
        backend="torch",
        lora=LoRAConfig(rank=rank, alpha=8.0),
        optim=OptimConfig(lr=1e-2),
        options=plugins.spec("train_engines", "torch").config(),
    )
    context = WorkerContext(plugins=plugins, role="actor", device=torch.device("cpu"), total_steps=4)
    return plugins.resolve("train_engines", "torch")(config, ModelConfig(path=str(path)), context)


def scrambled(engine, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return engine


def expected(engine, rollout):
    """Log-probs of the sampled tokens by the module with its adapter."""
    with torch.no_grad():
        found = torch.log_softmax(logits_of(engine.module, rollout.token_ids).double(), -1)
    return found[:-1].gather(1, rollout.token_ids[1:, None])[rollout.prompt_length - 1 :, 0]


@pytest.mark.slow
def test_an_adapter_alone_gives_the_log_probs_of_merged_weights(tmp_path):
    write_model(tmp_path / "base", {"head_dim": 32}, 0, tied=True)
    plugins = PluginSet.load({"rollout_engines": {"vllm"}})
    options = plugins.spec("rollout_engines", "vllm").config(**OPTIONS)
    config = RolloutConfig(backend="vllm", max_response_tokens=40, options=options)
    context = WorkerContext(
        plugins=plugins, role="rollout", device=torch.device("cpu"), live={"tokenizer": tokenizer()}
    )
    model = ModelConfig(path=str(tmp_path / "base"))
    engine = plugins.resolve("rollout_engines", "vllm")(config, model, context)
    trained = actor(tmp_path / "base")
    asked = [
        Request(f"r{i}", Prompt("p", [5, 6, 7], ""), Sampling(max_response_tokens=24, seed=i))
        for i in range(4)
    ]
    try:
        base = engine.generate(asked)
        sums = [engine.update_weights(stream_of(trained, True), 1)]  # adds nothing yet
        assert [r.token_ids.tolist() for r in engine.generate(asked)] == [r.token_ids.tolist() for r in base]
        for version in (2, 3):
            sums.append(engine.update_weights(stream_of(scrambled(trained, version), True), version))
            for rollout in engine.generate(asked):
                gap = rollout.rollout_log_probs[rollout.prompt_length :] - expected(trained, rollout)
                assert float(gap.abs().max()) < TOLERANCE
                assert set(rollout.policy_versions[3:].tolist()) == {version}
        assert len(set(sums)) == 3
        with pytest.raises(
            DataError, match=r"update to version 9 is no adapter: expected adapter_config\.json"
        ):
            engine.update_weights(trained.named_weights(), 9)
        with pytest.raises(
            ConfigError, match=r"rollout\.vllm\.adapter: vLLM does not take this adapter: .*rank"
        ):
            engine.update_weights(stream_of(scrambled(actor(tmp_path / "base", 17), 0), True), 9)
        (again,) = engine.generate(asked[:1])  # what was refused changed nothing
        gap = again.rollout_log_probs[again.prompt_length :] - expected(trained, again)
        assert float(gap.abs().max()) < TOLERANCE
        long = dataclasses.replace(asked[0], sampling=Sampling(max_response_tokens=40, seed=0))
        engine.add([long])
        engine.step()
        engine.update_weights(stream_of(scrambled(trained, 4), True), 4)
        done = []
        while not done:
            done = engine.step()
        later = done[0].policy_versions == 4
        assert bool(later.any())
        gap = done[0].rollout_log_probs[3:] - expected(trained, done[0])
        assert float(gap[later[3:]].abs().max()) < TOLERANCE
    finally:
        engine.close()
        trained.close()


@pytest.mark.slow
def test_a_lora_run_hands_its_adapter_over_and_both_stay_one_policy(tmp_path):
    write_model(tmp_path / "base", {"head_dim": 32}, 0, tied=True)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model.path": str(tmp_path / "base"),
        "data.train": str(tmp_path / "train.jsonl"),
        "data.prompts_per_step": 2,
        "rollout.backend": "vllm",
        "rollout.vllm": OPTIONS,
        "rollout.process": {},
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 16,
        "rollout.max_log_prob_gap": 1e-4,
        "actor.lora.rank": 4,
        "actor.optim.lr": 1e-2,
        "tracking.trackers": [],
        "run.dir": str(tmp_path / "runs"),
        "run.name": "lora",
        "run.steps": 2,
    }
    trainer = Trainer(
        load_config(settings),
        rewards=[lambda completions: [float(sum(map(ord, c)) % 3) for c in completions]],
    )
    trainer.train()
    trainer.close()
    lines = (tmp_path / "runs" / "lora" / "metrics.jsonl").read_text().splitlines()
    gaps = [json.loads(line)["mismatch/max_abs"] for line in lines]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    assert json.loads(lines[-1])["sync/bytes"] < 400_000


class Engine:
    """Of vLLM, as far as an adapter meets it."""

    unfinished = False

    def __init__(self):
        self.loaded = []

    def has_unfinished_requests(self):
        return self.unfinished

    def load(self, number, folder):
        if (folder / "adapter_model.safetensors").stat().st_size > 2000:
            raise ValueError("the rank is 17")
        self.loaded.append(json.loads((folder / "adapter_config.json").read_text())["r"])
        return SimpleNamespace(path=folder)


def stream(rank, size=4):
    yield ADAPTER_CONFIG, torch.frombuffer(bytearray(json.dumps({"r": rank}).encode()), dtype=torch.uint8)
    yield "base_model.model.q.lora_A.weight", torch.ones(rank, size)
    yield "base_model.model.q.lora_B.weight", torch.ones(size, rank)


def test_what_is_refused_leaves_the_adapter_before_it(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(adapter_module.versions, "load_adapter", lambda llm, *rest: llm.load(*rest))
    updater = AdapterUpdater(engine)
    engine.unfinished = True
    with pytest.raises(RuntimeError, match="first adapter came while responses of the base are under way"):
        updater.take(stream(2), 1)
    engine.unfinished = False
    sums = {updater.take(stream(rank), rank) for rank in (2, 2, 3)}
    assert len(sums) == 2
    assert engine.loaded == [2, 2, 3]
    before = updater.request
    for wrong in ([("model.q.weight", torch.ones(1))], [], list(stream(2))[1:]):
        with pytest.raises(DataError, match="is no adapter"):
            updater.take(iter(wrong), 4)
    with pytest.raises(
        ConfigError, match=r"vLLM does not take this adapter: the rank is 17 Raise rollout\.vllm\.max_lora"
    ):
        updater.take(stream(17, 64), 5)
    assert updater.request is before
    assert not updater.touched
    assert [path.name for path in before.path.parent.iterdir()] == ["3"]
    updater.close()
    assert not before.path.parent.exists()


def test_options_that_an_adapter_excludes_are_refused():
    with pytest.raises(ValidationError, match=r"adapter: with sleep_level = 2 the base would be given up"):
        VLLMOptions(adapter=True, sleep_level=2)
    with pytest.raises(
        ValidationError, match=r"'enable_lora' cannot be set: `adapter = true` switches it on"
    ):
        VLLMOptions(enable_lora=True)
