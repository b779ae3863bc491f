"""Frozen models scored by vLLM, real and on a CPU: what the train engine ``torch`` says of the same folder."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine_core.config import ModelConfig, RoleConfig, RolloutConfig
from engine_core.config.rewards import JudgeConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch
from engine_plugin_rewards.models.judge import JudgeReward, VerdictReader
from engine_plugin_rewards.models.questions import Questions
from engine_plugin_testing.reference import LETTERS, write_model
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_vllm_rollout.plugin import FrozenOptions, VLLMOptions

LENGTHS = (9, 2, 30, 5, 17)
OPTIONS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language model, and a classifier of one label, of the same shape."""
    root = tmp_path_factory.mktemp("frozen")
    write_model(root / "writes", {"head_dim": 32}, 0, tied=True)
    write_model(root / "scores", {"head_dim": 32}, 1, tied=True)
    config = AutoConfig.from_pretrained(root / "scores", num_labels=1)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "scores")
    return root


@pytest.fixture(scope="module")
def engines(folders):
    """``engines(role)``: vLLM's and the reference; each started once."""
    from engine_plugin_vllm_rollout.frozen import VLLMFrozenEngine

    made = {}

    def of(role):
        kind = "scores" if role == "reward_model" else "writes"
        if kind not in made:
            made[kind] = [
                build(made_of, folders / kind, role, options)
                for made_of, options in ((VLLMFrozenEngine, FrozenOptions(**OPTIONS)), (TorchEngine, None))
            ]
        return made[kind]

    yield of
    for engine in (engine for pair in made.values() for engine in pair):
        engine.close()


def build(made_of, folder, role, options=None, **settings):
    backend = "torch" if made_of is TorchEngine else "vllm"
    config = RoleConfig(backend=backend, path=str(folder), **settings)
    config.options = options
    context = WorkerContext(
        plugins=PluginSet.load({"train_engines": {"torch"}}),
        role=role,
        device=torch.device("cpu"),
        frozen=True,
    )
    return made_of(config, ModelConfig(path=str(folder)), context, trainable=False)


def batch(last_only=False, **columns):
    """Sequences of any tokens, as a question and its answer."""
    torch.manual_seed(3)
    lengths = torch.tensor(LENGTHS)
    ids = torch.randint(2, 97, (int(lengths.sum()),))
    made = Batch(token_ids=ids, lengths=lengths)
    if last_only:
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[made.offsets[1:] - 1] = True
    else:
        mask = torch.rand(len(ids)) < 0.7
        mask[made.offsets[:-1]] = False
    return made.with_columns({"loss_mask": mask, **columns})


@pytest.mark.slow
def test_the_scores_of_a_classifier_are_those_of_the_torch_engine(engines):
    ours, reference = engines("reward_model")
    asked = batch(last_only=True)
    found, expected = (engine.infer(asked, ("scores",))["scores"] for engine in (ours, reference))
    assert expected[asked["loss_mask"]].std() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    ours.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        ours.infer(asked, ("scores",))
    ours.wake()
    assert torch.equal(ours.infer(asked, ("scores",))["scores"], found)


@pytest.mark.slow
def test_a_verdicts_probabilities_and_a_teachers_are_those_of_the_torch_engine(engines):
    ours, reference = engines("teacher")
    candidates = torch.tensor([20, 7, 90]).expand(sum(LENGTHS), -1)
    verdict = batch(last_only=True, candidate_ids=candidates), ("log_probs_at", "log_rest")
    teacher = dataclasses.replace(batch(), top_k=8), ("log_probs", "top_ids", "top_log_probs", "top_log_rest")
    whole = dataclasses.replace(batch(), top_k=97), ("top_ids", "top_log_probs", "top_log_rest")
    for asked, outputs in (verdict, teacher, whole):
        found, expected = (engine.infer(asked, outputs) for engine in (ours, reference))
        assert list(found) == list(outputs)
        for name in outputs:
            torch.testing.assert_close(
                found[name], expected[name], atol=2e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    for change in (
        {"temperature": 0.5},
        {"token_ids": torch.full((200,), 5), "lengths": torch.tensor([200])},
    ):
        wrong = Batch(**{"token_ids": asked.token_ids, "lengths": asked.lengths} | change, top_k=2)
        wrong.tokens["loss_mask"] = torch.ones(len(wrong.token_ids), dtype=torch.bool)
        with pytest.raises(
            ConfigError, match=r"teacher\.vllm: (vLLM tells log-probs at temp|a sequence has 200 tok)"
        ):
            ours.infer(wrong, ("top_ids", "top_log_probs"))
    # it goes on after a refusal
    assert torch.equal(ours.infer(whole[0], whole[1])["top_ids"], expected["top_ids"])


def sampler(folder, **options):
    from engine_plugin_vllm_rollout.engine import VLLMRolloutEngine

    config = RolloutConfig(backend="vllm", max_response_tokens=9)
    config.options = VLLMOptions(**OPTIONS | options)
    context = WorkerContext(plugins=None, role="judge", device=torch.device("cpu"), live={})
    return VLLMRolloutEngine(config, ModelConfig(path=str(folder)), context)


@pytest.mark.slow
def test_a_judge_is_read_from_what_vllm_wrote(folders):
    folder, words = str(folders / "writes"), ["4", "four", "7777777"]
    table = JudgeConfig(
        path=folder,
        prompt="{completion}?",
        max_response_tokens=9,
        pattern="(?s).",
        verdicts={c: float(ord(c)) for c in LETTERS},
    )
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder).eval(),
    )
    engine = sampler(folder)
    judge = JudgeReward(Questions(table, tokenizer, "reward.judge"), engine.generate, 64, table, 0)
    outcomes = judge.score({"completion": words}, len(words))
    for word, outcome in zip(words, outcomes, strict=True):
        ids = tokenizer(f"{word}?", return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        written = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert outcome.value == VerdictReader(table).read(written)
    assert any(outcome.value is not None for outcome in outcomes)
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"max_model_len": 9},
            r"^reward\.judge\.vllm\.max_model_len = 9 leaves no room for a prompt: reward\.judge\.max_response_tokens is 9",
        ),
        (
            {"max_model_len": 999_999},
            r"reward\.judge\.vllm\.max_model_len is more than the model can hold",
        ),
    ],
)
def test_a_judge_that_does_not_start_is_told_the_keys_of_its_own_table(folders, options, words):
    with pytest.raises(ConfigError, match=words):
        sampler(folders / "writes", **options)


def test_a_judge_does_not_give_up_weights_that_no_update_brings():
    from engine_plugin_vllm_rollout.engine import VLLMRolloutEngine

    config = RolloutConfig(backend="vllm", options=VLLMOptions(sleep_level=2))
    with pytest.raises(
        ConfigError, match=r"reward\.judge\.vllm\.sleep_level = 2 gives weights up .* Set it to 1"
    ):
        VLLMRolloutEngine.check_pool(config, "judge", 1)
    VLLMRolloutEngine.check_pool(config, "rollout", 1)


def test_a_folder_without_weights_is_refused_before_vllm_starts(folders, tmp_path):
    from engine_plugin_vllm_rollout.frozen import VLLMFrozenEngine

    (tmp_path / "config.json").write_text((folders / "writes" / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=r"teacher\.path: '.*' holds no weights, and this model is not trained"
    ):
        build(VLLMFrozenEngine, tmp_path, "teacher")
