"""A real ``vllm serve`` on loopback: its answers are those of the train engine ``torch`` for the same folder."""

import dataclasses
import importlib.util
import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from engine_core.config import ModelConfig, RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch
from engine_plugin_testing.reference import write_model
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_vllm_rollout.served import VLLMServedEngine
from engine_plugin_vllm_rollout.server_options import VLLMServerOptions

NEEDS = "uvicorn: what a server needs besides the engine, see requirements-cpu.txt"
LENGTHS = (9, 2, 30, 5, 17)
TOKEN = "s3cr3t-of-the-test"
OUTPUTS = ("log_probs", "top_ids", "top_log_probs", "top_log_rest")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language model, and a classifier of one label, of the same shape."""
    root = tmp_path_factory.mktemp("served")
    write_model(root / "writes", {"head_dim": 32}, 0, tied=True)
    write_model(root / "scores", {"head_dim": 32}, 1, tied=True)
    config = AutoConfig.from_pretrained(root / "scores", num_labels=1)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "scores")
    return root


def context(role):
    plugins = PluginSet.load({"train_engines": {"torch"}})
    return WorkerContext(plugins=plugins, role=role, device=torch.device("cpu"), frozen=True)


def scorer(made_of, folder, role, options=None):
    config = RoleConfig(backend="torch" if made_of is TorchEngine else "vllm_server", path=str(folder))
    config.options = options
    return made_of(config, ModelConfig(path=str(folder)), context(role), trainable=False)


def batch(last_only, **columns):
    torch.manual_seed(3)
    lengths = torch.tensor(LENGTHS)
    made = Batch(token_ids=torch.randint(2, 97, (int(lengths.sum()),)), lengths=lengths)
    mask = torch.rand(made.num_tokens) < 0.7
    mask[made.offsets[:-1]] = False
    if last_only:
        mask = torch.zeros_like(mask)
        mask[made.offsets[1:] - 1] = True
    return made.with_columns({"loss_mask": mask, **columns})


@pytest.fixture
def running(monkeypatch):
    """Return a function that returns the options of a server at this address."""
    monkeypatch.setenv("SERVED_TOKEN", TOKEN)
    return lambda url: VLLMServerOptions(url=url, token_env="SERVED_TOKEN")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason=NEEDS)
def test_a_served_language_model_scores_as_the_torch_engine(folders, running, served):
    reference = scorer(TorchEngine, folders / "writes", "teacher")
    with served(folders / "writes", TOKEN, "--max-logprobs=-1") as url:
        engine = scorer(VLLMServedEngine, folders / "writes", "teacher", running(url))
        candidates = torch.tensor([20, 7, 90]).expand(sum(LENGTHS), -1)
        verdict = batch(True, candidate_ids=candidates), ("log_probs_at", "log_rest")
        for asked, outputs in (verdict, (dataclasses.replace(batch(False), top_k=40), OUTPUTS)):
            found, expected = (each.infer(asked, outputs) for each in (engine, reference))
            for name in outputs:
                torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=1e-5)
        _is_refused(folders, url, running(url))
    reference.close()


def _is_refused(folders, url, running):
    """Check that what does not fit is reported before anything is trained."""
    wrong = VLLMServerOptions(url=url)
    with pytest.raises(ConfigError, match=r"token_env: the server at .* wants a token\. Put it into"):
        scorer(VLLMServedEngine, folders / "writes", "teacher", wrong)
    unknown = running.model_copy(update={"model": "gpt"})
    with pytest.raises(ConfigError, match=r"model: 'gpt' is not served at"):
        scorer(VLLMServedEngine, folders / "writes", "teacher", unknown)
    with pytest.raises(
        ConfigError, match=r"/classify: status 404.*Expected with --runner pooling a sequence classifier"
    ):
        scorer(VLLMServedEngine, folders / "scores", "reward_model", running)
    other = shutil.copytree(folders / "writes", folders / "other")
    state = json.loads((other / "tokenizer.json").read_text())
    words = state["model"]["vocab"]
    words["a"], words["z"] = words["z"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"has other tokens than '.*other'"):
        scorer(VLLMServedEngine, other, "teacher", running)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason=NEEDS)
def test_a_served_classifier_scores_as_the_torch_engine(folders, running, served):
    reference = scorer(TorchEngine, folders / "scores", "reward_model")
    with served(folders / "scores", TOKEN, "--runner=pooling") as url:
        engine = scorer(VLLMServedEngine, folders / "scores", "reward_model", running(url))
        asked = batch(True)
        found, expected = (each.infer(asked, ("scores",))["scores"] for each in (engine, reference))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    reference.close()
