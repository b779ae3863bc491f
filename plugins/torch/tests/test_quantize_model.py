"""Models with quantised layers: against models that hold the rounded weights, and alone what they say of themselves."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError, DataError
from engine_core.types import LossCall
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.quantize_model import check_quantized
from engine_plugin_torch.quantized_linear import QuantizedLinear

NLL = LossCall("nll")
METHODS = ["int8", "fp8", "nf4", "fp4"]


def log_probs(engine, batch, **more):
    return engine.infer(batch, ["log_probs"], **more)["log_probs"]


def frozen(make_engine, method, family="llama", **more):
    return make_engine(family, trainable=False, role="ref", quantize=method, **more)


def adapted(make_engine, batch, method="nf4", family="llama", steps=2, lora=None, **more):
    engine = make_engine(family, lora=lora or {"rank": 4}, quantize=method, **more)
    for _ in range(steps):
        engine.forward_backward(batch, NLL)
        engine.optimizer_step()
    return engine


def quantised_layers(engine):
    return {n for n, part in engine.module.named_modules() if isinstance(part, QuantizedLinear)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_a_frozen_role_computes_with_the_rounded_weights(make_engine, batch, tmp_path, method, family):
    engine = frozen(make_engine, method, family)
    engine.export(tmp_path / "rounded")
    rounded = make_engine(family, trainable=False, role="ref", model={"path": str(tmp_path / "rounded")})
    torch.testing.assert_close(log_probs(engine, batch), log_probs(rounded, batch), rtol=0, atol=3e-5)
    whole = make_engine(family, trainable=False, role="ref")
    assert (log_probs(engine, batch) - log_probs(whole, batch)).abs().max() > 1e-3
    assert dict(engine.named_weights()).keys() == dict(whole.named_weights()).keys()


def test_linear_layers_are_quantised_and_heads_embeddings_and_norms_are_not(make_engine):
    engine = frozen(make_engine, "int8")
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    kinds += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert quantised_layers(engine) == {f"model.layers.{i}.{kind}" for i in (0, 1) for kind in kinds}
    whole = dict(make_engine("llama", trainable=False, role="ref").named_weights())
    for name, weight in engine.named_weights():
        assert torch.equal(weight, whole[name]) == ("proj" not in name), name


def test_a_value_head_stays_whole(make_engine, batch):
    engine = frozen(make_engine, "int8", model=None)
    scoring = make_engine("llama", trainable=False, role="reward_model", quantize="int8")
    assert type(scoring.module.score) is nn.Linear
    assert len(quantised_layers(scoring)) == len(quantised_layers(engine)) == 14


def test_the_memory_said_is_that_of_the_weights(make_engine, caplog):
    caplog.set_level("INFO", "engine")
    engine, whole = frozen(make_engine, "int8"), make_engine("llama", trainable=False, role="ref")
    weights = dict(whole.named_weights())
    linear = [w for name, w in weights.items() if "proj" in name]
    expected = sum(w.numel() * 4 for w in weights.values()) - sum(
        w.numel() * 3 - w.shape[0] * 4 for w in linear
    )
    buffers = sum(b.numel() * b.element_size() for b in whole.module.buffers())
    assert engine.change.bytes_after == expected + buffers
    assert engine.change.bytes_before == sum(w.numel() * 4 for w in weights.values()) + buffers
    assert "ref: int8, 14 layers, weights 0.1 -> 0.0 MiB." in caplog.messages


@pytest.mark.parametrize("mix", [1.0, 0.25])
def test_a_quantised_role_takes_weights_rounded_anew(make_engine, batch, mix):
    trained, engine, whole = make_engine("llama"), frozen(make_engine, "int8"), frozen(make_engine, "int8")
    trained.forward_backward(batch, NLL)
    trained.optimizer_step()
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    engine.load_named_weights(trained.named_weights(), mix)
    mixed = {n: torch.lerp(before[n], w, mix) for n, w in trained.named_weights()}
    whole.load_named_weights(mixed.items())
    assert torch.equal(log_probs(engine, batch), log_probs(whole, batch))
    name = "model.layers.1.mlp.up_proj.weight"
    step = mixed[name].abs().amax(1, keepdim=True) / 127
    assert ((dict(engine.named_weights())[name] - mixed[name]).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_quantised_role_comes_back_bit_for_bit(make_engine, batch, tmp_path, method):
    engine = frozen(make_engine, method)
    engine.load_named_weights(make_engine("llama", model={"seed": 3}).named_weights())
    engine.save(tmp_path / "saved").result()
    other = frozen(make_engine, method)
    assert not torch.equal(log_probs(other, batch), log_probs(engine, batch))
    other.load(tmp_path / "saved")
    assert torch.equal(log_probs(other, batch), log_probs(engine, batch))


def test_sleeping_and_waking_changes_nothing(make_engine, batch):
    engine = frozen(make_engine, "nf4")
    before = log_probs(engine, batch)
    engine.sleep()
    engine.wake()
    assert torch.equal(log_probs(engine, batch), before)


# an adapter above a quantised base


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_learns_above_a_quantised_base_that_stays_as_it_is(make_engine, batch, method):
    engine, base = adapted(make_engine, batch, method), frozen(make_engine, method)
    assert torch.equal(log_probs(engine, batch, adapter=False), log_probs(base, batch))
    assert (log_probs(engine, batch) - log_probs(base, batch)).abs().max() > 0.1
    assert all("lora_" in name for name, p in engine.module.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("method", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_its_gradient_is_that_of_an_adapter_above_the_rounded_weights(
    make_engine, batch, tmp_path, method, family
):
    frozen(make_engine, method, family).export(tmp_path / "rounded")
    engine = make_engine(family, lora={"rank": 4}, quantize=method)
    plain = make_engine(family, lora={"rank": 4}, model={"path": str(tmp_path / "rounded")})
    for one in (engine, plain):
        for _ in range(2):  # from the second on, both factors have gradients
            one.forward_backward(batch, NLL)
            gradients = {n: p.grad.clone() for n, p in one.module.named_parameters() if p.grad is not None}
            one.optimizer_step()
        one.gradients = gradients
    assert engine.gradients.keys() == plain.gradients.keys()
    for name, gradient in engine.gradients.items():
        scale = plain.gradients[name].abs().max()
        torch.testing.assert_close(
            gradient, plain.gradients[name], rtol=0, atol=2e-3 * float(scale), msg=name
        )


@pytest.mark.parametrize("method", ["int8", "nf4"])
def test_the_merged_weights_are_the_rounded_ones_and_the_product(make_engine, batch, tmp_path, method):
    engine, base = adapted(make_engine, batch, method), frozen(make_engine, method)
    rounded = dict(base.named_weights())
    merged = dict(engine.named_weights())
    assert merged.keys() == rounded.keys()
    for name, weight in merged.items():
        layer = engine.module.get_submodule(name.removesuffix(".weight"))
        expected = rounded[name].double()
        if hasattr(layer, "lora_A"):
            expected = (
                expected
                + 8 * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            )
        torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6, msg=name)
    engine.export(tmp_path / "merged")
    whole = make_engine("llama", trainable=False, role="ref", model={"path": str(tmp_path / "merged")})
    torch.testing.assert_close(log_probs(whole, batch), log_probs(engine, batch), rtol=0, atol=2e-4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("method", ["int8", "nf4"])
def test_a_resumed_run_goes_on_bit_for_bit(make_engine, batch, tmp_path, method):
    engine = adapted(make_engine, batch, method, steps=2)
    engine.save(tmp_path / "saved").result()
    assert all("lora_" in name for name in load_file(tmp_path / "saved" / "weights.safetensors"))
    other = adapted(make_engine, batch, method, steps=0)
    other.load(tmp_path / "saved")
    for one in (engine, other):
        one.forward_backward(batch, NLL)
        one.optimizer_step()
    assert torch.equal(log_probs(other, batch), log_probs(engine, batch))


def test_an_adapter_is_told_by_the_base_before_it_was_rounded(make_engine, batch, tmp_path):
    engine, whole = adapted(make_engine, batch), make_engine("llama", lora={"rank": 4})
    assert engine.adapter.base_identity() == whole.adapter.base_identity()
    engine.save(tmp_path / "saved").result()
    other = adapted(make_engine, batch, steps=0, model={"seed": 3})
    with pytest.raises(DataError, match="an adapter of another base model"):
        other.load(tmp_path / "saved")


def test_a_whole_model_is_taken_into_the_base_rounded(make_engine, batch):
    engine = adapted(make_engine, batch, "int8")
    weights = dict(make_engine("llama", model={"seed": 3}).named_weights())
    engine.load_named_weights(weights.items())
    base = frozen(make_engine, "int8")
    base.load_named_weights(weights.items())
    assert torch.equal(log_probs(engine, batch), log_probs(base, batch))


def test_an_exported_adapter_is_one_of_peft(make_engine, batch, tmp_path):
    engine = adapted(make_engine, batch, "int8")
    frozen(make_engine, "int8").export(tmp_path / "rounded")
    engine.export(tmp_path / "adapter", adapter=True)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "rounded"), tmp_path / "adapter"
    )
    engine.export(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = batch.token_ids[None, :20]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, merged(ids).logits, rtol=0, atol=2e-4)


def test_the_share_that_is_trained_is_told_of_all_weights(make_engine, caplog):
    caplog.set_level("INFO", "engine")
    for method in (None, "nf4"):
        make_engine("llama", lora={"rank": 4}, quantize=method)
    whole, quantized = (line for line in caplog.messages if line.startswith("LoRA: "))
    assert quantized == whole


def test_modules_that_are_trained_whole_are_not_quantised(make_engine, batch):
    engine = adapted(
        make_engine,
        batch,
        "int8",
        lora={"rank": 4, "modules_to_save": ["down_proj"], "target_modules": ["q_proj"]},
    )
    assert not any("down_proj" in name for name in quantised_layers(engine))
    assert any("up_proj" in name for name in quantised_layers(engine))
    dict(engine.named_weights())


def test_infer_and_training_see_the_same_numbers(make_engine, batch, monkeypatch):
    engine = adapted(make_engine, batch)
    expected = log_probs(engine, batch)
    seen = []

    def watching(outputs, micro):
        seen.append(outputs["log_probs"].detach().clone())
        return (outputs["log_probs"] * micro["weights"]).sum(), {}

    monkeypatch.setattr(engine, "_resolve", lambda loss: watching)
    engine.forward_backward(batch, NLL)
    assert torch.equal(torch.cat(seen).cpu(), expected)


# what is refused


def test_weights_that_are_trained_are_not_quantised(make_engine):
    with pytest.raises(
        ConfigError,
        match=r"^actor\.torch\.quantize: 'int8' is for weights that are not trained.*\[actor\.lora\]",
    ):
        make_engine(quantize="int8")


def test_4_bits_without_bitsandbytes_are_refused_with_what_to_install(make_engine, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    with pytest.raises(
        ConfigError,
        match=r"^ref\.torch\.quantize: 'nf4' needs the package bitsandbytes.*engine-plugin-torch\[quant\]",
    ):
        frozen(make_engine, "nf4")
    frozen(make_engine, "int8")


def test_layers_of_4_bits_are_not_compiled(make_engine):
    with pytest.raises(
        ValueError, match=r"compile = true with quantize = 'nf4': layers of 4 bits cannot be compiled"
    ):
        frozen(make_engine, "nf4", compile=True)
    assert not frozen(make_engine, "nf4")._compiles


def test_a_device_that_lacks_the_method_is_refused():
    with pytest.raises(
        ConfigError, match=r"^ref\.torch\.quantize: 'fp8' does not run on mps; it runs on cpu, cuda, xpu"
    ):
        check_quantized("fp8", torch.device("mps"), "ref.torch", frozen=True)


def test_a_model_given_from_python_is_not_changed_for_the_actor_and_copied_for_others(make_engine, batch):
    live = {"model": make_engine("llama").module}
    with pytest.raises(
        ConfigError, match=r"^actor\.torch\.quantize: a model given from Python is the caller's"
    ):
        make_engine("llama", lora={"rank": 2}, quantize="int8", live=live)
    frozen(make_engine, "int8", live=live)
    assert not any(isinstance(part, QuantizedLinear) for part in live["model"].modules())


def test_a_model_without_linear_layers_is_refused(make_engine):
    hooks = {"engine_build_model": lambda role: nn.Embedding(4, 4)}
    with pytest.raises(
        ConfigError, match=r"^ref\.torch\.quantize: Embedding has no linear layer besides its head"
    ):
        frozen(make_engine, "int8", hooks=hooks)


def test_dora_above_a_quantised_base_is_refused(make_engine):
    with pytest.raises(ConfigError, match=r"^actor\.lora\.dora: .* is a QuantizedLinear, not an nn\.Linear"):
        make_engine("llama", lora={"rank": 2, "dora": True}, quantize="int8")


def test_the_checks_run_before_anything_is_built(make_engine):
    config = make_engine("llama").config.model_copy()
    config.options = config.options.model_copy(update={"quantize": "int8"})
    context = WorkerContext(plugins=None, role="actor", device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^actor\.torch\.quantize"):
        TorchEngine.check(config, context)
    TorchEngine.check(config, context, trainable=False)
