"""Models with a value head: built, computed, trained, saved, exported."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaForSequenceClassification,
)

from engine_core.errors import ConfigError, DataError, PluginError
from engine_core.types import LossCall
from engine_plugin_torch.packed_forward import ValueForward
from engine_plugin_torch.value_models import value_class

FAMILIES = ["qwen3", "llama", "gemma2", "mistral", "qwen3_moe", "granite"]
VALUE = LossCall("value", {}, outputs=("values",))


@pytest.fixture
def make_critic(make_engine):
    def make(family="qwen3", **arguments):
        return make_engine(family, role="critic", **arguments)

    return make


def by_hand(engine, batch):
    """``values`` and ``scores`` in float64, one sequence at a time through the decoder alone."""
    module = copy.deepcopy(engine.module).cpu()
    if not hasattr(module.config, "num_experts"):  # experts have no product in float64
        module = module.double()
    module.set_attn_implementation("eager")
    weight = module.score.weight[0].tolist()
    values, scores = [], []
    masks = batch["loss_mask"].split(batch.lengths.tolist())
    for ids, mask in zip(batch.token_ids.split(batch.lengths.tolist()), masks, strict=True):
        hidden = module.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        numbers = [sum(h * w for h, w in zip(row, weight, strict=True)) for row in hidden.tolist()]
        values += [n * bool(m) for n, m in zip([0.0, *numbers[:-1]], mask, strict=True)]
        scores += [n * bool(m) for n, m in zip(numbers, mask, strict=True)]
    return {"values": torch.tensor(values), "scores": torch.tensor(scores)}


def lively(engine):
    """A head that is far from 0, so that a mistake shows."""
    with torch.no_grad():
        weight = engine.module.score.weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_of_the_token_before_and_scores_of_the_token_itself(make_critic, batch, family):
    engine = lively(make_critic(family, budget=40))
    found = engine.infer(batch, ["values", "scores"])
    expected = by_hand(engine, batch)
    for name in ("values", "scores"):
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)
    assert found["values"].abs().max() > 0.5


def test_a_critic_that_mixes_packed_sequences_gets_one_at_a_time(make_critic):
    module = make_critic("llama").module

    def leaking(_, inputs, output):
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + 0.08 * hidden[:, :1]

    module.base_model.register_forward_hook(leaking)
    forward = ValueForward(module, torch.device("cpu"), torch.float32)
    forward.settle()
    assert not forward.packs


def test_the_score_of_the_last_token_is_what_transformers_computes(make_critic, batch, tmp_path):
    engine = lively(make_critic("llama"))
    engine.export(tmp_path / "out")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert type(theirs) is LlamaForSequenceClassification
    found = engine.infer(batch, ["scores"])["scores"]
    for i, ids in enumerate(batch.token_ids.split(batch.lengths.tolist())):
        if len(ids) > 2:
            score = theirs(ids[None]).logits[0, 0]
            torch.testing.assert_close(found[batch.offsets[i + 1] - 1], score, rtol=1e-4, atol=1e-4)


def test_the_decoder_is_that_of_the_actor_and_the_head_begins_near_zero(make_critic, make_engine, batch):
    actor, critic = dict(make_engine().named_weights()), dict(make_critic().named_weights())
    assert critic.keys() - actor.keys() == {"score.weight"}
    for name in critic.keys() & actor.keys():
        torch.testing.assert_close(critic[name], actor[name], rtol=0, atol=0)
    assert 0 < critic["score.weight"].std() < 2 / 33
    other = dict(make_critic(model={"seed": 1}).named_weights())
    assert not torch.equal(other["score.weight"], critic["score.weight"])


def test_a_language_models_folder_gets_a_fresh_head_that_the_seed_decides(make_critic, make_engine, tmp_path):
    make_engine("llama").export(tmp_path / "model")
    state = torch.get_rng_state()
    first, again = (make_critic(model={"path": str(tmp_path / "model")}) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    own = {name: weight.cpu() for name, weight in first.named_weights()}
    assert own.keys() == (weights.keys() - {"lm_head.weight"}) | {"score.weight"}
    torch.testing.assert_close(own["model.norm.weight"], weights["model.norm.weight"])
    assert torch.equal(own["score.weight"], dict(again.named_weights())["score.weight"].cpu())
    assert 0 < own["score.weight"].std() < 2 / 33


def test_an_exported_critic_is_taken_with_its_head(make_critic, batch, tmp_path):
    engine = lively(make_critic("granite"))  # transformers has no such class for this family
    engine.export(tmp_path / "critic")
    again = make_critic(model={"path": str(tmp_path / "critic")})
    values = engine.infer(batch, ["values"])["values"]
    torch.testing.assert_close(again.infer(batch, ["values"])["values"], values, rtol=0, atol=0)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["GraniteForSequenceClassification"]


def test_a_checkpoint_goes_on_bit_for_bit(make_critic, batch, tmp_path):
    batch = batch.with_columns(
        {"returns": torch.randn(batch.num_tokens), "values": torch.zeros(batch.num_tokens)}
    )

    def step(engine):
        engine.forward_backward(batch, VALUE)
        return engine.optimizer_step()

    whole, cut, resumed = (make_critic() for _ in range(3))
    step(whole), step(whole)
    step(cut)
    cut.save(tmp_path / "saved").result()
    resumed.load(tmp_path / "saved")
    assert step(resumed) == step(cut)
    for name, weight in resumed.named_weights():
        assert torch.equal(weight, dict(whole.named_weights())[name]), name


def test_the_value_loss_has_the_gradient_of_its_definition(make_critic, batch):
    engine = lively(make_critic(budget=40))
    generator = torch.Generator().manual_seed(1)
    returns, old = (torch.randn(batch.num_tokens, generator=generator) for _ in range(2))
    batch = batch.with_columns({"returns": returns, "values": old})
    output = engine.forward_backward(batch, LossCall("value", {"value_clip": 0.5}, outputs=("values",)))
    found = {n: p.grad.to("cpu", copy=True) for n, p in engine.module.named_parameters()}
    module = copy.deepcopy(engine.module).cpu().double()
    module.set_attn_implementation("eager")
    module.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(batch)):
        here = slice(batch.offsets[i], batch.offsets[i + 1])
        hidden = module.base_model(input_ids=batch.token_ids[here][None], use_cache=False).last_hidden_state[
            0
        ]
        value = torch.cat([hidden.new_zeros(1), hidden[:-1] @ module.score.weight[0]])
        clipped = old[here] + (value - old[here]).clamp(-0.5, 0.5)
        loss = 0.5 * torch.maximum((value - returns[here]) ** 2, (clipped - returns[here]) ** 2)
        total = total + (batch["weights"][here] * loss).sum()
    total.backward()
    assert output.loss == pytest.approx(total.item(), rel=1e-4)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-3, atol=1e-4)


def test_a_live_model_is_copied_and_the_actor_keeps_its_own(make_engine, make_critic, batch):
    live = make_engine("llama").module
    critic = make_critic(live={"model": live})
    before = live.model.norm.weight.clone()
    batch = batch.with_columns(
        {"returns": torch.ones(batch.num_tokens), "values": torch.zeros(batch.num_tokens)}
    )
    critic.forward_backward(batch, VALUE)
    critic.optimizer_step()
    assert torch.equal(live.model.norm.weight, before)
    assert not torch.equal(critic.module.model.norm.weight, before)
    assert hasattr(live, "lm_head")
    assert not hasattr(critic.module, "lm_head")


class Positions(torch.nn.Module):
    """Value of a token: the sum of the tokens up to and with it, times a weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, input_ids, position_ids):
        @dataclasses.dataclass
        class Output:
            values: torch.Tensor

        return Output(self.weight * input_ids.cumsum(1))


class Plain(Positions):
    """The same without an object around the values."""

    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, position_ids).values


class Columns(Positions):
    """The same as a linear head gives them."""

    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, position_ids).values[..., None]


class Logits(Positions):
    """A language model."""

    def forward(self, input_ids, position_ids):
        return self.weight * torch.nn.functional.one_hot(input_ids)


@pytest.mark.parametrize("kind", [Positions, Plain, Columns])
def test_a_plugin_builds_a_critic_of_its_own(make_critic, batch_of, kind):
    engine = make_critic(hooks={"engine_build_model": lambda role: kind() if role == "critic" else None})
    batch = batch_of([4, 3])
    batch.token_ids[:] = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    found = engine.infer(batch, ["values", "scores"])
    assert found["values"].tolist() == [0, 0, 1.5, 3, 0, 0, 5.5]
    assert found["scores"].tolist() == [0, 0, 3, 5, 0, 0, 9]


def test_a_plugin_whose_critic_gives_no_values_is_told(make_critic, batch):
    engine = make_critic(hooks={"engine_build_model": lambda role: Logits()})
    with pytest.raises(
        PluginError,
        match=r"Logits was built for a critic, and its forward gives \[1, 7, \d+\], not values \[1, T\]",
    ):
        engine.infer(batch, ["values"])


def test_a_plugin_whose_critic_has_no_head_is_told(make_critic, make_engine):
    language = make_engine().module
    with pytest.raises(PluginError, match="Qwen3ForCausalLM was built for a critic and has no head 'score'"):
        make_critic(hooks={"engine_build_model": lambda role: language})


def test_a_first_token_has_no_value_and_nothing_to_learn_gives_zero(make_critic, batch_of):
    engine = lively(make_critic())
    batch = batch_of([3, 1])
    batch.tokens["loss_mask"][:] = True
    found = engine.infer(batch, ["values", "scores"])
    assert (found["values"] != 0).tolist() == [False, True, True, False]
    assert (found["scores"] != 0).tolist() == [True, True, True, True]
    batch.tokens["loss_mask"][:] = False
    assert not engine.infer(batch, ["values"])["values"].any()


def test_an_actor_has_no_values_and_a_critic_no_log_probs(make_engine, make_critic, batch):
    with pytest.raises(ValueError, match="Unknown output 'values' of TorchEngine in the role 'actor'"):
        make_engine().infer(batch, ["values"])
    with pytest.raises(ValueError, match=r"in the role 'critic'\. Known: scores, values"):
        make_critic().infer(batch, ["log_probs"])


def test_a_head_of_several_labels_is_refused(make_critic, tmp_path, make_engine):
    make_engine("llama").export(tmp_path / "model")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3).save_pretrained(
        tmp_path / "three"
    )
    with pytest.raises(DataError, match=r"of another shape: .*score\.weight"):
        make_critic(model={"path": str(tmp_path / "three")})


def test_what_transformers_does_not_know_gets_no_head(make_critic):
    with pytest.raises(
        ConfigError, match=r"Linear, which is no transformers model. Give the role a separate path"
    ):
        make_critic(live={"model": torch.nn.Linear(2, 2)})


def test_a_family_with_another_prefix_keeps_its_names(tmp_path):
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, pad_token_id=0, num_labels=1)
    causal = AutoModelForCausalLM.from_config(config)
    made = value_class(config)(config)
    shared = {name for name in causal.state_dict() if not name.startswith("lm_head")}
    assert set(made.state_dict()) == shared | {"score.weight"}


def test_a_bf16_decoder_under_autocast_gives_values_in_float32(make_critic, batch):
    engine = lively(make_critic(compute_dtype="bf16"))
    values = engine.infer(batch, ["values"])["values"]
    held = values[values != 0]
    assert (held != held.bfloat16().float()).any()  # not rounded to 8 bits
    torch.testing.assert_close(values, by_hand(engine, batch)["values"], rtol=0.1, atol=0.3)
