"""The engine with real models, alone and beside a real train engine."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from engine_core.config import ModelConfig, OptimConfig, RoleConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import DataError, TrainingFailed
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.weights import published_weights

CPU = torch.device("cpu")


def context(role, **live):
    plugins = PluginSet.load({"train_engines": {"torch"}, "rollout_engines": {"hf"}})
    return WorkerContext(plugins=plugins, role=role, device=CPU, total_steps=10, live=live)


@pytest.fixture
def make_engine(make_model, tokenizer):
    """``make_engine(model, batch_size=2)``: an engine around a copy of the model."""

    def make(model=None, config=None, **options):
        live = {"tokenizer": tokenizer, "model": make_model() if model is None else model}
        return HFRolloutEngine(
            RolloutConfig(options=HFOptions(**options), **(config or {})),
            ModelConfig(),
            context("rollout", **live),
        )

    return make


@pytest.fixture
def make_trainer():
    def make(model):
        config = RoleConfig(optim=OptimConfig(lr=0.1), options=TorchOptions(device="cpu"))
        return TorchEngine(config, ModelConfig(), context("actor", model=model))

    return make


def tokens_of(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


# -- rollouts -----------------------------------------------------------------


def test_a_rollout_says_all_that_is_known_of_its_tokens(make_engine, speaker, tokenizer, make_requests):
    engine = make_engine(speaker("Helo!"))
    engine.set_version(7)
    request = make_requests([tokenizer.encode("H")], top_k=4)[0]
    request.group_id, request.index = 5, 3
    (rollout,) = engine.generate([request])
    assert tokenizer.decode(rollout.token_ids) == "Helo!<eos>"
    assert rollout.text == "elo!"
    assert rollout.loss_mask.tolist() == [False] + [True] * 5
    assert rollout.policy_versions.tolist() == [0] + [7] * 5
    assert rollout.finish_reason == "stop"
    assert (rollout.request_id, rollout.group_id, rollout.index) == ("r0", 5, 3)
    assert rollout.prompt is request.prompt
    assert rollout.token_ids.dtype == torch.int64
    assert rollout.policy_versions.dtype == torch.int32
    assert rollout.rollout_log_probs.dtype == torch.float32
    assert rollout.rollout_log_probs[0] == 0
    assert bool((rollout.rollout_log_probs[1:] < 0).all())


@pytest.mark.parametrize("sampling", [{"top_p": 0.7}, {"top_k": 6}, {"top_p": 0.9, "top_k": 6}])
def test_the_mass_that_a_cut_kept_leads_back_to_the_whole_vocabulary(
    make_engine, make_model, make_requests, ragged, sampling
):
    model = make_model()
    for rollout in make_engine(model).generate(make_requests(ragged, temperature=1.3, **sampling)):
        ids = rollout.token_ids
        with torch.no_grad():
            whole = torch.log_softmax(model(ids[None]).logits[0] / 1.3, -1)
        expected = whole[:-1].gather(1, ids[1:, None]).squeeze(1) * rollout.loss_mask[1:]
        found = (rollout.rollout_log_probs + rollout.extras["support_log_mass"])[1:]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
        assert bool((rollout.extras["support_log_mass"][rollout.loss_mask] < 0).any())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0, "top_p": 0.5}])
def test_without_a_cut_there_is_no_mass_to_tell(make_engine, make_requests, sampling):
    (rollout,) = make_engine().generate(make_requests([[5]], **sampling))
    assert rollout.extras == {}


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_the_batch_size_changes_no_token(make_engine, make_requests, ragged, batch_size):
    requests = make_requests(ragged * 2)
    expected = tokens_of(make_engine().generate(requests))
    found = make_engine(batch_size=batch_size).generate(requests)
    assert tokens_of(found) == expected
    assert [rollout.request_id for rollout in found] == [request.id for request in requests]


def test_a_step_finishes_one_batch_the_longest_prompts_first(make_engine, make_requests, ragged):
    engine = make_engine(batch_size=4)
    engine.add(make_requests(ragged))
    lengths = []
    while engine.num_unfinished:
        lengths.append(sorted(rollout.prompt_length for rollout in engine.step()))
    assert lengths == [[9, 11, 14, 20], [2, 3, 5, 7], [1]]
    assert engine.step() == []


def test_a_malformed_request_queues_none(make_engine, make_requests):
    engine = make_engine()
    with pytest.raises(DataError, match=r"Request 'r1' \(prompt 'train:1'\) has no tokens"):
        engine.add(make_requests([[5], []]))
    assert engine.num_unfinished == 0
    with pytest.raises(DataError, match="holds 64 with the response"):
        engine.add(make_requests([[5] * 64]))
    with pytest.raises(DataError, match="knows 0 to 259"):
        engine.add(make_requests([[260]]))
    first = make_requests([[5]])
    with pytest.raises(ValueError, match="is queued already"):
        engine.add(first + first)
    engine.add(first)
    with pytest.raises(ValueError, match="is queued already"):
        engine.add(first)


@pytest.mark.parametrize(
    ("version", "cause"),
    [(0, "no update has changed it. Check the files"), (3, "its weights have diverged. Lower")],
)
def test_logits_that_are_not_numbers_are_explained(make_engine, make_model, make_requests, version, cause):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    engine = make_engine(model)
    engine.version = version
    with pytest.raises(
        TrainingFailed, match=rf"not numbers \(request 'r0', policy version {version}\): {cause}"
    ):
        engine.generate(make_requests([[5]]))


def test_a_tokenizer_without_an_end_is_refused(make_model, tokenizer):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(
        DataError, match="The tokenizer has no end-of-sequence token, so a response could never end"
    ):
        HFRolloutEngine(
            RolloutConfig(), ModelConfig(), context("rollout", tokenizer=endless, model=make_model())
        )


def test_a_model_folder_needs_no_live_objects(
    tmp_path, make_model, tokenizer, make_requests, ragged, make_engine
):
    model = make_model("llama", seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = HFRolloutEngine(RolloutConfig(), ModelConfig(path=str(tmp_path)), context("rollout"))
    requests = make_requests(ragged)
    assert tokens_of(engine.generate(requests)) == tokens_of(make_engine(model).generate(requests))


def test_half_precision_samples_too(tmp_path, make_model, tokenizer, make_requests, ragged):
    make_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = RolloutConfig(options=HFOptions(dtype="bf16"))
    engine = HFRolloutEngine(config, ModelConfig(path=str(tmp_path)), context("rollout"))
    assert all(r.rollout_log_probs.dtype == torch.float32 for r in engine.generate(make_requests(ragged)))


# -- stopping between calls ---------------------------------------------------


def test_abort_gives_back_what_was_not_sampled(make_engine, make_requests):
    engine = make_engine()
    requests = make_requests([[5, 6], [7], [8]])
    engine.add(requests)
    aborted = engine.abort(["r1", "unknown"])
    assert [(r.request_id, r.finish_reason, r.token_ids.tolist(), r.text) for r in aborted] == [
        ("r1", "abort", [7], "")
    ]
    assert not aborted[0].loss_mask.any()
    assert engine.num_unfinished == 2
    assert {r.request_id for r in engine.step()} == {"r0", "r2"}


def test_the_id_of_a_stopped_request_is_free_at_once(make_engine, make_requests):
    first, second, other = make_requests([[5, 6], [7], [8]], max_response_tokens=40)
    engine = make_engine(tokens_per_step=2, config={"request_timeout_seconds": 3600.0})
    engine.add([first, second])
    done = engine.step()
    (begun,) = engine.abort(["r0"])
    engine.add([replace(first, begun=begun)])
    while engine.num_unfinished:
        done += engine.step()
    whole = {rollout.request_id: rollout for rollout in done}
    assert (len(done), set(whole)) == (2, {"r0", "r1"})
    assert whole["r0"].finish_reason != "abort"
    assert whole["r0"].token_ids[: len(begun.token_ids)].tolist() == begun.token_ids.tolist()
    engine.add([first])
    engine.step()
    engine.abort(["r0"])
    engine.add([replace(other, id="r0")])
    assert engine.abort(["r0"])[0].token_ids.tolist() == [8]


def test_pause_drain_finishes_what_waits(make_engine, make_requests, ragged):
    engine = make_engine(batch_size=2)
    engine.add(make_requests(ragged))
    engine.pause("drain")
    with pytest.raises(RuntimeError, match=r"The sampler is paused; call resume\(\) first"):
        engine.step()
    assert engine.num_unfinished == 9
    with pytest.raises(ValueError, match="is queued already"):  # until its rollout is returned
        engine.add(make_requests([[5]]))
    engine.resume()
    done = engine.step()
    assert len(done) == 9
    assert {rollout.finish_reason for rollout in done} <= {"stop", "length"}
    assert engine.num_unfinished == 0


def test_pause_abort_drops_what_waits(make_engine, make_requests):
    engine = make_engine()
    engine.add(make_requests([[5], [6]]))
    engine.pause("abort")
    engine.resume()
    assert [rollout.finish_reason for rollout in engine.step()] == ["abort", "abort"]


def test_pause_keep_freezes_what_waits(make_engine, make_requests):
    engine = make_engine()
    requests = make_requests([[5], [6]])
    expected = tokens_of(make_engine().generate(requests))
    engine.add(requests)
    engine.pause("keep")
    assert engine.num_unfinished == 2
    engine.resume()
    assert sorted(tokens_of(engine.step())) == sorted(expected)


def test_an_unknown_pause_is_refused_and_changes_nothing(make_engine, make_requests):
    engine = make_engine()
    with pytest.raises(
        ValueError, match=r"Unknown pause mode 'drian'\. Did you mean 'drain'\? Known: abort, drain, keep"
    ):
        engine.pause("drian")
    assert len(engine.generate(make_requests([[5]]))) == 1


# -- weights ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_updated_weights_are_those_of_a_fresh_model(make_engine, make_model, make_requests, ragged, family):
    engine = make_engine(make_model(family, seed=0))
    requests = make_requests(ragged)
    before = tokens_of(engine.generate(requests))
    held = {name: tensor.data_ptr() for name, tensor in engine._module().named_parameters()}
    other = make_model(family, seed=1)
    engine.update_weights(published_weights(other), version=4)
    after = engine.generate(requests)
    assert tokens_of(after) == tokens_of(make_engine(other).generate(requests)) != before
    assert all(bool((rollout.policy_versions[rollout.loss_mask] == 4).all()) for rollout in after)
    assert {name: tensor.data_ptr() for name, tensor in engine._module().named_parameters()} == held


def test_experts_come_under_published_names(make_engine, tokenizer, make_requests, ragged):
    config = Qwen3MoeConfig(
        vocab_size=260, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    first, second = (AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval() for _ in range(2))
    engine = make_engine(first)
    engine.update_weights(published_weights(second), version=1)
    found, expected = engine._module().state_dict(), second.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_checksum_is_that_of_what_was_received(make_engine, make_model):
    engine = make_engine()
    first = engine.update_weights(published_weights(make_model(seed=1)), 1)
    assert engine.update_weights(published_weights(make_model(seed=2)), 2) != first
    assert engine.update_weights(published_weights(make_model(seed=1)), 3) == first


def test_a_model_given_from_python_is_copied(make_engine, make_model, make_requests):
    model = make_model(seed=0)
    before = copy.deepcopy(model.state_dict())
    engine = make_engine(model)
    engine.update_weights(published_weights(make_model(seed=1)), 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def broken(kind, weights):
    weights = dict(weights)
    if kind == "partial":
        weights.pop("model.norm.weight")
    elif kind == "unknown":
        weights["model.nrm.weight"] = weights.pop("model.norm.weight")
    elif kind == "misshaped":
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    return weights.items()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("partial", r"The update to version 4 lacks 1 weights, such as 'model\.norm\.weight'"),
        (
            "unknown",
            r"Unknown weight 'model\.nrm\.weight' in the update to version 4\. Did you mean 'model\.norm\.weight'\?",
        ),
        ("misshaped", r"Weight 'model\.norm\.weight' came as \[31\]; expected \[32\]"),
    ],
)
def test_a_broken_update_is_refused_and_no_token_sampled_until_a_whole_one_came(
    make_engine, make_model, make_requests, kind, words
):
    engine, other, requests = make_engine(), make_model(seed=1), make_requests([[5]])
    with pytest.raises(DataError, match=words):
        engine.update_weights(broken(kind, published_weights(other)), version=4)
    assert engine.version == 0
    with pytest.raises(
        DataError,
        match=r"weights of two versions \(an update to version 4 did not come to its end\)\. Update them again",
    ):
        engine.generate(requests)
    engine.abort([request.id for request in requests])
    engine.update_weights(published_weights(other), version=5)
    assert tokens_of(engine.generate(requests)) == tokens_of(make_engine(other).generate(requests))


def test_a_stream_that_breaks_half_way_is_no_update(make_engine, make_model, make_requests):
    def breaks():
        yield next(iter(published_weights(make_model(seed=1))))
        raise ConnectionError("gone")

    engine = make_engine()
    with pytest.raises(ConnectionError):
        engine.update_weights(breaks(), version=1)
    with pytest.raises(DataError, match="weights of two versions"):
        engine.generate(make_requests([[5]]))


# -- beside a train engine ----------------------------------------------------


def test_a_shared_module_has_new_weights_at_once(
    make_engine, make_model, make_trainer, make_requests, ragged
):
    trainer = make_trainer(make_model(seed=0))
    engine = make_engine(trainer.module)
    engine.share_module(trainer)
    requests = make_requests(ragged)
    before = tokens_of(engine.generate(requests))
    other = make_model(seed=1)
    trainer.load_named_weights(published_weights(other))
    engine.set_version(1)
    after = engine.generate(requests)
    assert tokens_of(after) == tokens_of(make_engine(other).generate(requests)) != before
    assert all(bool((rollout.policy_versions[rollout.loss_mask] == 1).all()) for rollout in after)


def test_sampling_leaves_a_shared_module_ready_to_train(make_engine, make_model, make_trainer, make_requests):
    trainer = make_trainer(make_model())
    engine = make_engine(trainer.module)
    engine.share_module(trainer)
    engine.generate(make_requests([[5]]))
    loss = trainer.module(torch.tensor([[5, 6, 7]])).logits.sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in trainer.module.parameters())


def test_a_shared_module_is_not_updated(make_engine, make_model, make_trainer):
    trainer = make_trainer(make_model())
    engine = make_engine(trainer.module)
    engine.share_module(trainer)
    with pytest.raises(RuntimeError, match="uses the trainer's own module; there is nothing to update"):
        engine.update_weights(published_weights(make_model()), 1)


@pytest.mark.parametrize("base", ["Module", "PreTrainedModel", "no attention_mask"])
def test_a_module_without_the_interface_of_transformers_is_sampled_from_without_a_cache(
    make_engine, make_model, make_trainer, make_requests, base
):
    model = make_model()

    class Plain(torch.nn.Module if base == "Module" else PreTrainedModel):
        def __init__(self):
            super().__init__(*([] if base == "Module" else [PretrainedConfig()]))
            self.inner = model

        def forward(self, input_ids, position_ids=None, **others):
            assert not others
            assert input_ids.shape == position_ids.shape == (1, input_ids.shape[1])
            return self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits

    if base == "no attention_mask":  # of no use for the padding of a cache
        plain = Plain.forward
        Plain.forward = lambda self, input_ids, position_ids=None, past_key_values=None: plain(
            self, input_ids, position_ids
        )
    shared, other = make_trainer(model), make_trainer(Plain())
    cached, uncached = make_engine(), make_engine()
    cached.share_module(shared)
    uncached.share_module(other)
    requests = make_requests([[5], [5, 6, 7], [5], [9, 8]], max_response_tokens=12)
    for one, two in zip(cached.generate(requests), uncached.generate(requests), strict=True):
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.rollout_log_probs.tolist() == pytest.approx(two.rollout_log_probs.tolist(), abs=1e-5)
        assert one.finish_reason == two.finish_reason


# -- asleep -------------------------------------------------------------------


def test_asleep_it_neither_samples_nor_updates(make_engine, make_model, make_requests):
    engine, requests = make_engine(), make_requests([[5]])
    expected = tokens_of(engine.generate(requests))
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"asleep: its weights cannot be updated\. Call wake\(\) first"):
        engine.update_weights(published_weights(make_model(seed=1)), 1)
    engine.add(requests)
    with pytest.raises(RuntimeError, match=r"The sampler is asleep; call wake\(\) first"):
        engine.step()
    engine.wake(only=["kv_cache"])
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    engine.wake()
    assert tokens_of(engine.step()) == expected


def test_a_sleep_that_keeps_the_weights_samples_on(make_engine, make_requests):
    engine = make_engine()
    engine.sleep(keep=["weights"])
    assert len(engine.generate(make_requests([[5]]))) == 1


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_an_unknown_part_is_refused(make_engine, method):
    with pytest.raises(
        ValueError,
        match=r"Unknown part 'weigths' of a sampler\. Did you mean 'weights'\? Known: kv_cache, weights",
    ):
        getattr(make_engine(), method)(["weigths"])


def test_a_closed_engine_holds_nothing(make_engine, make_requests):
    engine = make_engine()
    engine.add(make_requests([[5]]))
    engine.close()
    assert engine.num_unfinished == 0


def test_a_model_of_a_plugin_is_as_long_as_its_folder_says(tmp_path, tokenizer, make_requests):
    """Its module has no transformers config; the length is in the folder's ``config.json``, or in ``model.override``."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from engine_core import hookimpl\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed = torch.nn.Embedding(260, 8)\n"
        "    def forward(self, input_ids, position_ids=None):\n"
        "        return self.embed(input_ids) @ self.embed.weight.T\n"
        "@hookimpl\n"
        "def engine_build_model(role):\n"
        "    return Own()\n"
    )
    plugins = PluginSet.load({"train_engines": {"torch"}, "rollout_engines": {"hf"}}, ["own.py"], tmp_path)

    def longest(**override):
        made = WorkerContext(plugins=plugins, role="rollout", device=CPU, live={"tokenizer": tokenizer})
        config = RolloutConfig(options=HFOptions(), weights="own")
        engine = HFRolloutEngine(config, ModelConfig(path=str(tmp_path), override=override), made)
        (rollout,) = engine.generate(make_requests([tokenizer.encode("H")], max_response_tokens=30))
        return len(rollout.token_ids)

    assert longest() > 12
    (tmp_path / "config.json").write_text('{"vocab_size": 260, "max_position_embeddings": 12}')
    assert longest() <= 12
    assert longest(max_position_embeddings=5) <= 5
