"""A real ``vllm serve`` on loopback, started by the plugin: what the train engine ``torch`` says of the same folder."""

import dataclasses
import importlib.util
import json
import os
import shutil
import time
import urllib.error
import urllib.request

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine_core.config import ModelConfig, RoleConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, Prompt, Request, Sampling
from engine_plugin_testing.reference import write_model
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_vllm_rollout.served import VLLMServedEngine, VLLMServedSampler
from engine_plugin_vllm_rollout.server_options import VLLMServerOptions

NEEDS = "uvicorn: what a server needs besides the engine, see requirements-cpu.txt"
LENGTHS = (9, 2, 30, 5, 17)
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26}
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


def children_of(group):
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def status_of(url, token=""):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason=NEEDS)
def test_a_served_language_model_scores_as_the_torch_engine_and_judges(folders, monkeypatch):
    monkeypatch.setenv("SERVED_TOKEN", "s3cr3t-of-the-test")
    options = VLLMServerOptions(start={"options": ENGINE}, token_env="SERVED_TOKEN")
    reference = scorer(TorchEngine, folders / "writes", "teacher")
    engine = scorer(VLLMServedEngine, folders / "writes", "teacher", options)
    group = engine._server._process.popen.pid
    try:
        candidates = torch.tensor([20, 7, 90]).expand(sum(LENGTHS), -1)
        verdict = batch(True, candidate_ids=candidates), ("log_probs_at", "log_rest")
        for asked, outputs in (verdict, (dataclasses.replace(batch(False), top_k=40), OUTPUTS)):
            found, expected = (each.infer(asked, outputs) for each in (engine, reference))
            for name in outputs:
                torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=1e-5)
        url = engine._server.url
        assert status_of(f"{url}/v1/models") == 401  # nobody else asks it
        assert status_of(f"{url}/v1/models", "s3cr3t-of-the-test") == 200
        running = VLLMServerOptions(url=url, token_env="SERVED_TOKEN")
        _judges(folders / "writes", running)
        _is_refused(folders, url, running)
    finally:
        engine.close()
        reference.close()
    deadline = time.monotonic() + 60  # they are killed, and the kernel takes its time
    while left := children_of(group):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _judges(folder, options):
    """Greedy answers, as transformers samples them."""
    config = RolloutConfig(backend="vllm_server", max_response_tokens=6)
    config.options = options
    judge = VLLMServedSampler(config, ModelConfig(path=str(folder)), context("judge"))
    questions = [[5, 40, 13], [60, 2], [8, 9, 10, 11, 12]]
    sampling = Sampling(0.0, max_response_tokens=6, seed=1, log_probs=False)
    requests = [Request(str(i), Prompt(str(i), ids, ""), sampling, i, 0) for i, ids in enumerate(questions)]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for ids, rollout in zip(questions, judge.generate(requests), strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=1)[0]
        assert rollout.token_ids.tolist() == expected.tolist()
    judge.close()


def _is_refused(folders, url, running):
    """What does not fit, told before anything is trained."""
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
def test_a_served_classifier_scores_as_the_torch_engine(folders):
    reference = scorer(TorchEngine, folders / "scores", "reward_model")
    engine = scorer(
        VLLMServedEngine, folders / "scores", "reward_model", VLLMServerOptions(start={"options": ENGINE})
    )
    try:
        asked = batch(True)
        found, expected = (each.infer(asked, ("scores",))["scores"] for each in (engine, reference))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    finally:
        engine.close()
        reference.close()
