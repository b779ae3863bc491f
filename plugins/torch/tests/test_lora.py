"""Which layers get an adapter, with which first weights, and what is refused before the model is touched."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from engine_core.errors import ConfigError, DataError
from engine_core.types import LossCall
from engine_plugin_torch.engine import TorchEngine

NLL = LossCall("nll")


def adapted(engine):
    """Names of the layers with an adapter."""
    names = {name.rpartition(".lora_A")[0] for name in engine.adapter.tensors() if ".lora_A" in name}
    return {name.removeprefix("base_model.model.model.layers.") for name in names}


def test_a_fresh_adapter_changes_no_log_prob(make_engine, batch):
    expected = make_engine().infer(batch, ["log_probs"])["log_probs"]
    for lora in ({}, {"init": "gaussian"}, {"rslora": True}, {"dora": True}, {"modules_to_save": ["norm"]}):
        found = make_engine(lora=lora).infer(batch, ["log_probs"])["log_probs"]
        assert torch.equal(found, expected), lora


def test_all_linear_is_every_linear_layer_but_the_head(make_engine):
    for family in ("qwen3", "llama"):  # tied and not
        parts = make_engine(family).module.named_modules()
        linear = {n.removeprefix("model.layers.") for n, part in parts if isinstance(part, nn.Linear)}
        assert adapted(make_engine(family, lora={})) == linear - {"lm_head"}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["q_proj"], {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        (["self_attn.o_proj", "layers.1.mlp.up_proj"], {"0.self_attn.o_proj", "1.self_attn.o_proj", "1.mlp.up_proj"}),
        (r"model\.layers\.1\..*_proj", {f"1.self_attn.{p}_proj" for p in "qkvo"} | {f"1.mlp.{p}_proj" for p in ("gate", "up", "down")}),
    ],
)  # fmt: skip
def test_layers_are_named_by_ends_or_by_a_regular_expression(make_engine, asked, expected):
    assert adapted(make_engine(lora={"target_modules": asked})) == expected


def test_only_the_adapter_is_trained_and_in_float32(make_engine, batch):
    engine = make_engine("llama", lora={"rank": 4, "modules_to_save": ["lm_head"]}, param_dtype="bf16")
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    assert all("lora_" in name or ".modules_to_save." in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in frozen.values()} == {torch.bfloat16}
    held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trained.values()}
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    for _ in range(2):
        engine.forward_backward(batch, NLL)
        assert engine.optimizer_step().grad_norm > 0
    changed = {n for n, p in engine.module.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(trained)


def test_first_weights_follow_the_seed_and_leave_the_random_state_alone(make_engine):
    state = torch.get_rng_state()
    first, again = make_engine(lora={}), make_engine(lora={})
    assert torch.equal(torch.get_rng_state(), state)
    other = make_engine(lora={}, model={"seed": 1})
    for name, value in first.adapter.tensors().items():
        assert torch.equal(value, again.adapter.tensors()[name])
        if ".lora_A" in name:
            assert not torch.equal(value, other.adapter.tensors()[name])


@pytest.mark.parametrize(("rslora", "scale"), [(False, 32 / 4), (True, 32 / 2)])
def test_the_product_is_scaled_by_alpha_over_rank_or_its_root(make_engine, rslora, scale):
    engine = make_engine(lora={"rank": 4, "alpha": 32.0, "rslora": rslora, "target_modules": ["q_proj"]})
    layer = engine.module.get_submodule("model.layers.0.self_attn.q_proj")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(b)
    x = torch.randn(3, 32).to(a.device)
    with torch.no_grad():
        expected = layer.base_layer.weight.double() @ x.double().T + scale * b.double() @ (
            a.double() @ x.double().T
        )
        torch.testing.assert_close(layer(x).double(), expected.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "left_out", "why"),
    [
        ("glm4_moe", "0.mlp.gate_proj", "peft adapts all experts of a mixture instead"),
        ("falcon_h1", "0.mamba.out_proj", "the fused kernel of Mamba layers reads the weight itself"),
    ],
)
def test_a_layer_whose_adapter_would_not_be_used_is_left_out_and_refused_by_name(
    make_engine, family, left_out, why
):
    engine = make_engine(family, lora={})
    assert left_out not in adapted(engine)
    assert "0.self_attn.q_proj" in adapted(engine)
    assert not any("experts" in name for name in engine.adapter.tensors())
    with pytest.raises(ConfigError, match=rf"'model\.layers\.{left_out}' cannot have an adapter: {why}"):
        make_engine(family, lora={"target_modules": [f"layers.{left_out}"]})


def test_activation_checkpointing_gives_the_same_gradient(make_engine, batch):
    norms = []
    for recompute in (False, True):
        engine = make_engine(lora={"init": "gaussian"}, activation_checkpointing=recompute)
        engine.forward_backward(batch, NLL)
        engine.optimizer_step()
        engine.forward_backward(batch, NLL)
        norms.append(engine.optimizer_step().grad_norm)
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["q_porj"]}, r"actor\.lora\.target_modules: 'q_porj' is no layer of this model\. Did you mean 'q_proj'\?"),
        ({"target_modules": "k_proj"}, r"'k_proj' is no layer .* Did you mean 'k_proj'\?|'k_proj' is no layer"),
        ({"target_modules": "("}, r"'\(' is no regular expression"),
        ({"target_modules": []}, r"an empty list"),
        ({"modules_to_save": ["nrom"]}, r"modules_to_save: 'nrom' is no module of this model\. Did you mean 'norm'\?"),
        ({"modules_to_save": ["lm_head"]}, r"'lm_head' shares its weight .*tied embeddings"),
        ({"target_modules": ["embed_tokens"]}, r"'model\.embed_tokens' shares its weight"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]}, r"is in target_modules and in modules_to_save"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_have_is_refused(make_engine, lora, message):
    with pytest.raises(ConfigError, match=message):
        make_engine("qwen3", lora=lora)


def test_a_model_is_compared_with_its_adapter_before_a_start_unless_the_engine_builds_it(make_engine):
    class OwnModel(TorchEngine):
        def _build_model_optimizer(self, **arguments):
            return super()._build_model_optimizer(**arguments)

    built = make_engine("qwen3", lora={})
    table = built.config.model_copy(
        update={"lora": built.config.lora.model_copy(update={"target_modules": ["q_porj"]})}
    )
    with pytest.raises(ConfigError, match="'q_porj' is no layer of this model"):
        TorchEngine.check_model(table, built.model_config, "actor", 1)
    OwnModel.check_model(table, built.model_config, "actor", 1)


def test_dora_over_an_embedding_is_refused(make_engine):
    with pytest.raises(ConfigError, match=r"actor\.lora\.dora: 'model\.embed_tokens' is a Embedding"):
        make_engine("llama", lora={"dora": True, "target_modules": ["embed_tokens", "q_proj"]})


def test_dropout_is_refused_with_the_reason():
    from engine_core.config.roles import LoRAConfig

    with pytest.raises(ValueError, match="dropout must be 0: engines run in eval mode"):
        LoRAConfig(dropout=0.1)


def test_a_model_that_has_an_adapter_already_is_refused(make_engine):
    module = make_engine("llama", lora={}).module
    with pytest.raises(ConfigError, match="has an adapter already"):
        make_engine("llama", lora={}, live={"model": module})


def test_an_engine_that_brings_its_own_optimizer_takes_no_adapter(make_engine):
    class Own(TorchEngine):
        def _build_model_optimizer(self, **arguments):
            module = super()._build_model_optimizer(**arguments)
            return module, torch.optim.SGD(module.parameters(), 0.1), None

    with pytest.raises(ConfigError, match=r"\[actor\.lora\]: the plugin that builds this model"):
        make_engine(lora={}, cls=Own)


def test_the_layers_and_the_share_that_is_trained_are_logged(make_engine, caplog):
    caplog.set_level(logging.INFO, logger="engine")
    engine = make_engine(lora={"rank": 2, "target_modules": ["q_proj"]})
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    assert f"LoRA: rank 2 on 2 layers (q_proj); {trained:,} of " in caplog.text


# -- starting from a folder ----------------------------------------------------


@pytest.fixture
def folder(make_engine, batch, tmp_path):
    """The adapter of an engine that has trained."""
    engine = make_engine("llama", lora={"rank": 4, "alpha": 6.0, "target_modules": ["q_proj", "v_proj"]})
    engine.forward_backward(batch, NLL)
    engine.optimizer_step()
    engine.export(tmp_path / "adapter", adapter=True)
    return tmp_path / "adapter", engine.infer(batch, ["log_probs"])["log_probs"]


def test_training_goes_on_from_an_adapter_folder_with_its_own_settings(make_engine, batch, folder):
    path, expected = folder
    engine = make_engine("llama", lora={"path": str(path)})
    assert torch.equal(engine.infer(batch, ["log_probs"])["log_probs"], expected)
    assert engine.adapter.config.r == 4
    assert make_engine("llama", lora={"path": str(path), "target_modules": ["v_proj", "q_proj"]}).adapter


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, r"actor\.lora\.rank: got 8, but the adapter in .* has 4\. Leave the key out"),
        ({"target_modules": ["k_proj"]}, r"actor\.lora\.target_modules: got \['k_proj'\]"),
        ({"dora": True}, r"actor\.lora\.dora: got True"),
    ],
)
def test_settings_other_than_the_folder_has_are_refused(make_engine, folder, lora, message):
    with pytest.raises(ConfigError, match=message):
        make_engine("llama", lora={"path": str(folder[0]), **lora})


def test_a_folder_that_is_no_adapter_of_lora_is_refused(make_engine, folder, tmp_path):
    with pytest.raises(ConfigError, match="is no adapter folder"):
        make_engine("llama", lora={"path": str(tmp_path)})
    config = folder[0] / "adapter_config.json"
    values = json.loads(config.read_text())
    for change, message in (
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, r"'rank_pattern' is \{'q_proj': 2\}, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' is 'pissa_niter_4', which is not supp"),
        ({"init_lora_weights": "OLoRA"}, "'init_lora_weights' is 'OLoRA', which is not supported"),
        (
            {"alora_invocation_tokens": [5, 6]},
            r"'alora_invocation_tokens' is \[5, 6\], which is not supported",
        ),
    ):
        config.write_text(json.dumps(values | change))
        with pytest.raises(DataError, match=message):
            make_engine("llama", lora={"path": str(folder[0])})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"r": 4', "adapter_config.json is no JSON file: Expecting .*Write the adapter again"),
        ("[4]", "adapter_config.json holds a list, not a table"),
        ('{"peft_type": "LORA", "r": "four"}', "adapter_config.json: .*rank"),
    ],
)
def test_a_damaged_config_of_an_adapter_is_refused_with_its_file(make_engine, folder, text, message):
    (folder[0] / "adapter_config.json").write_text(text)
    with pytest.raises(DataError, match=f"(?s){message}"):
        make_engine("llama", lora={"path": str(folder[0])})


def test_an_adapter_of_another_shape_is_refused(make_engine, folder):
    with pytest.raises(DataError, match="has shape"):
        make_engine("llama", lora={"path": str(folder[0])}, model={"override": {"hidden_size": 16}})


def test_a_critic_trains_its_head_whole_beside_the_adapter(make_engine, batch):
    engine = make_engine("llama", lora={"rank": 4}, role="critic")
    expected = make_engine("llama", role="critic").infer(batch, ["values"])["values"]
    assert torch.equal(engine.infer(batch, ["values"])["values"], expected)
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert "score.modules_to_save.default.weight" in trained
    assert all(".lora_" in name or name.startswith("score.modules_to_save.") for name in trained)
    plain = {name: value.shape for name, value in make_engine("llama", role="critic").named_weights()}
    assert {name: value.shape for name, value in engine.named_weights()} == plain


def test_other_roles_copy_the_base_of_a_live_model(make_engine, batch):
    module = make_engine("llama").module
    actor = make_engine("llama", lora={"modules_to_save": ["norm"]}, live={"model": module})
    expected = actor.infer(batch, ["log_probs"])["log_probs"]
    actor.forward_backward(batch, NLL)
    actor.optimizer_step()
    ref = make_engine("llama", live={"model": module}, role="ref", trainable=False)
    assert not any("lora" in name or "modules_to_save" in name for name, _ in ref.module.named_parameters())
    assert torch.equal(ref.infer(batch, ["log_probs"])["log_probs"], expected)
    critic = make_engine("llama", live={"model": module}, role="critic")
    assert all(p.requires_grad and "lora" not in name for name, p in critic.module.named_parameters())
