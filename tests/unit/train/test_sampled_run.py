"""What an update of the sampler reports; sampling itself is in tests/integration."""

import logging
from types import SimpleNamespace

import pytest
import torch

from engine_core.config.models import DataConfig
from engine_core.contracts.weight_sync import SyncResult
from engine_core.errors import PluginError
from engine_core.specs import Environment
from engine_core.train import sampled_run
from engine_core.train.sampled_run import SampledRun


class Run(SampledRun):
    def step(self, step):
        return {}


def test_the_switch_is_the_update_and_all_memory_handed_over_since_the_last_one():
    pushed = iter([SyncResult(1, 8, 0.25, ""), SyncResult(2, 8, 0.5, "")])
    run = Run.__new__(Run)
    run.runtime = SimpleNamespace(
        traded_seconds=3.0, push_weights=lambda *_: next(pushed), loss_metrics=lambda: {"sampling/lost": 0.0}
    )
    run.emit = lambda *_: None
    run.version, run._traded = 0, 1.0
    assert run.push_weights(updated=True)["time/offload_and_sync"] == 2.0 + 0.25
    run.runtime.traded_seconds = 7.0
    assert run.push_weights(updated=True)["time/offload_and_sync"] == 4.0 + 0.5


def test_the_tools_of_the_environment_are_those_that_it_declares(monkeypatch):
    monkeypatch.setattr(sampled_run, "PromptSource", lambda *arguments: arguments[-1])
    tool = {"type": "function", "function": {"name": "add"}}
    spec = Environment(load=print, tools=(tool,))
    run = Run.__new__(Run)
    run.tokenizer, run.text_config = None, None
    run.plugins = SimpleNamespace(spec=lambda kind, name: {("environments", "maths"): spec}[kind, name])
    run.config = SimpleNamespace(
        environment=SimpleNamespace(name="maths"),
        rollout=SimpleNamespace(options=None),
        run=SimpleNamespace(seed=0),
    )
    data = DataConfig()
    assert run.source_of("train", data, None) == (tool,)
    assert run.source_of("train", DataConfig(columns={"tools": ""}), None) == ()
    run.config.environment = None
    assert run.source_of("train", data, None) == ()


@pytest.fixture
def sampled():
    """A run of a model with 6 tokens and 5 positions."""
    run = Run.__new__(Run)
    run.text_config = SimpleNamespace(vocab_size=6, max_position_embeddings=5)
    rollout = SimpleNamespace(
        backend="foreign", options=None, max_response_tokens=4, temperature=1.0, request_timeout_seconds=0
    )
    run.config = run.settings = SimpleNamespace(rollout=rollout)
    run.settings.config = run.settings.now = run.config
    run._cut_is_noted = False
    return run


@pytest.mark.parametrize(("prompt", "response", "noted"), [(2, 3, True), (1, 4, False), (2, 2, False)])
def test_a_response_that_the_models_positions_end_is_noted_once(sampled, caplog, prompt, response, noted):
    rollout = SimpleNamespace(
        finish_reason="length", token_ids=[0] * (prompt + response), response_length=response
    )
    sampled.samples = True
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sampled._note_cut([rollout])
    assert caplog.text.count("fills the 5 positions of the model") == noted


def test_a_token_that_the_model_does_not_have_is_refused_before_it_is_learned(sampled):
    sampled._check_ids(SimpleNamespace(token_ids=torch.tensor([0, 5])))
    with pytest.raises(
        PluginError, match="rollouts of 'foreign' have the token 6, but the model has 6 tokens"
    ):
        sampled._check_ids(SimpleNamespace(token_ids=torch.tensor([6, 0])))
