"""An adapter against float64 models with its product added by hand; its files against peft itself."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine_core.errors import ConfigError, DataError
from engine_core.types import LossCall

NLL = LossCall("nll")
KINDS = {
    "plain": {"rank": 4},
    "rslora": {"rank": 4, "rslora": True, "init": "gaussian"},
    "dora": {"rank": 4, "dora": True},
    "with a module": {"rank": 4, "modules_to_save": ["norm"]},
}


def trained(make_engine, batch, family="llama", lora=None, steps=2, **more):
    engine = make_engine(family, lora=KINDS["plain"] if lora is None else lora, **more)
    for _ in range(steps):
        engine.forward_backward(batch, NLL)
        engine.optimizer_step()
    return engine


def log_probs(engine, batch, **more):
    return engine.infer(batch, ["log_probs"], **more)["log_probs"]


def alone(model, batch, grad=False):
    """[T] log-probs of the loss tokens, one sequence at a time."""
    rows = []
    for ids, mask in zip(
        batch.token_ids.split(batch.lengths.tolist()), batch["loss_mask"].split(batch.lengths.tolist()), strict=True
    ):  # fmt: skip
        with torch.set_grad_enabled(grad):
            logits = model(input_ids=ids[None].to(next(model.parameters()).device)).logits[0].cpu()
            found = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None]).squeeze(1)
        rows.append(torch.cat([torch.zeros(1, dtype=logits.dtype), found]) * mask)
    return torch.cat(rows)


def by_hand(engine, lora):
    """The base's weights in float64 with the product of every layer added, from the adapter's own tensors."""
    weights = {n: t.double().cpu() for n, t in engine.module.state_dict().items() if "lora_" not in n}
    weights = {n.replace(".base_layer", ""): t for n, t in weights.items() if ".original_module" not in n}
    weights = {n.replace(".modules_to_save.default", ""): t for n, t in weights.items()}
    scale = 32 / 4**0.5 if lora.get("rslora") else 32 / 4
    tensors = {
        n.removeprefix("base_model.model."): t.double().cpu() for n, t in engine.adapter.tensors().items()
    }
    for name, a in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        layer = name.removesuffix(".lora_A.weight")
        changed = weights[f"{layer}.weight"] + scale * tensors[f"{layer}.lora_B.weight"] @ a
        if lora.get("dora"):
            lengths = (changed**2).sum(1).sqrt()
            changed = changed / lengths[:, None] * tensors[f"{layer}.lora_magnitude_vector"][:, None]
        weights[f"{layer}.weight"] = changed
    return weights


@pytest.mark.parametrize("lora", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_forward_with_adapter_and_the_merged_weights_are_w_plus_scale_b_a(
    make_engine, batch, family, lora
):
    engine = trained(make_engine, batch, family, lora)
    expected = by_hand(engine, lora)
    merged = dict(engine.named_weights())
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.double().cpu(), expected[name], rtol=0, atol=2e-6, msg=name)
    tied = {"lm_head.weight"} if family != "llama" else set()
    assert merged.keys() == expected.keys() - tied
    model = AutoModelForCausalLM.from_config(engine.module.config, dtype=torch.float64).eval()
    model.load_state_dict(expected)
    torch.testing.assert_close(log_probs(engine, batch).double(), alone(model, batch), rtol=0, atol=2e-4)


def test_the_stream_of_merged_weights_leaves_the_module_alone(make_engine, batch):
    engine = trained(make_engine, batch)
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    held = [name for name, _ in engine.named_weights()]
    after = engine.module.state_dict()
    assert len(held) == len(set(held))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_merged_weights_of_bfloat16_are_rounded_once(make_engine, batch):
    engine = trained(make_engine, batch, param_dtype="bf16")
    layer = engine.module.get_submodule("model.layers.1.mlp.up_proj")
    product = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    expected = (layer.base_layer.weight.double() + 8 * product).bfloat16()
    found = dict(engine.named_weights())["model.layers.1.mlp.up_proj.weight"]
    assert found.dtype == torch.bfloat16
    different = (found != expected).float().mean()
    assert different < 0.01  # a tie of the float32 sum may round the other way


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2"])
def test_without_the_adapter_the_engine_is_a_separate_base_model(make_engine, batch, family):
    engine = trained(make_engine, batch, family)
    reference = make_engine(family, trainable=False, role="ref")
    expected = log_probs(reference, batch)
    assert torch.equal(log_probs(engine, batch, adapter=False), expected)
    assert (log_probs(engine, batch) - expected).abs().max() > 0.1


def test_the_adapter_stays_off_until_the_outermost_context_ends(make_engine, batch):
    engine = trained(make_engine, batch, "llama")
    expected, adapted = log_probs(engine, batch, adapter=False), log_probs(engine, batch)
    with engine.without_adapter():
        log_probs(engine, batch, adapter=False)
        assert torch.equal(log_probs(engine, batch), expected)
    assert torch.equal(log_probs(engine, batch), adapted)


def test_infer_without_the_adapter_leaves_training_as_it_was(make_engine, batch):
    plain, asked = trained(make_engine, batch, steps=1), trained(make_engine, batch, steps=1)
    plain.forward_backward(batch, NLL)
    asked.forward_backward(batch, NLL)
    log_probs(asked, batch, adapter=False)
    trainable = [name for name, p in asked.module.named_parameters() if p.requires_grad]
    assert trainable == [name for name, p in plain.module.named_parameters() if p.requires_grad]
    assert asked.optimizer_step() == plain.optimizer_step()
    assert torch.equal(log_probs(asked, batch), log_probs(plain, batch))


def test_the_switch_comes_back_after_an_error_and_in_a_role_that_is_not_trained(make_engine, batch):
    engine = make_engine("llama", lora={"modules_to_save": ["norm"]}, trainable=False, role="ref")
    with pytest.raises(KeyError), engine.without_adapter():
        raise KeyError
    assert not any(p.requires_grad for p in engine.module.parameters())
    assert not any(getattr(part, "disable_adapters", False) is True for part in engine.module.modules())


def test_generation_uses_the_adapter(make_engine, batch):
    engine = trained(make_engine, batch)
    with engine.generation_module() as module:
        found = alone(module, batch)
    torch.testing.assert_close(found, log_probs(engine, batch), rtol=0, atol=1e-4)


# -- files -----------------------------------------------------------------------


@pytest.mark.parametrize("lora", KINDS.values(), ids=KINDS)
def test_the_adapter_has_the_names_and_values_that_peft_gives_it(make_engine, batch, lora):
    engine = trained(make_engine, batch, lora=lora)
    expected = get_peft_model_state_dict(engine.module, save_embedding_layers=False)
    found = dict(engine.named_weights(adapter=True))
    assert found.keys() == {f"base_model.model.{name}" for name in expected}
    assert all(torch.equal(found[f"base_model.model.{name}"], value) for name, value in expected.items())


@pytest.mark.parametrize("lora", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_peft_loads_an_exported_adapter(make_engine, batch, tmp_path, family, lora):
    make_engine(family).export(tmp_path / "base")
    engine = trained(make_engine, batch, family, lora, model={"path": str(tmp_path / "base")})
    engine.export(tmp_path / "adapter", adapter=True)
    assert engine.adapter_config() == (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(log_probs(engine, batch), alone(model, batch), rtol=0, atol=1e-4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    ends = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(config["target_modules"]) == ends


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_an_export_is_the_merged_model(make_engine, batch, tmp_path, family):
    engine = trained(make_engine, batch, family, {"rank": 4, "modules_to_save": ["norm"]})
    engine.export(tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(log_probs(engine, batch), alone(model.eval(), batch), rtol=0, atol=1e-4)
    written = load_file(tmp_path / "out" / "model.safetensors")
    weights = dict(engine.named_weights())
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], value.cpu()) for name, value in weights.items())
    plain = make_engine(family, model={"path": str(tmp_path / "out")})
    assert (log_probs(plain, batch) - log_probs(engine, batch)).abs().max() < 1e-4


def test_an_adapter_of_a_model_without_one_is_refused(make_engine, tmp_path):
    engine = make_engine("llama")
    for ask in (
        lambda: engine.export(tmp_path / "x", adapter=True),
        lambda: engine.named_weights(adapter=True),
    ):
        with pytest.raises(ConfigError, match=r"has no adapter: its run file has no \[actor\.lora\]"):
            ask()


# -- taking weights -----------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_adapter_goes_from_one_engine_to_another(make_engine, batch, family):
    source, target = trained(make_engine, batch, family), make_engine(family, lora=KINDS["plain"])
    target.load_named_weights(source.named_weights(adapter=True))
    assert torch.equal(log_probs(target, batch), log_probs(source, batch))
    assert torch.equal(log_probs(target, batch, adapter=False), log_probs(source, batch, adapter=False))


@pytest.mark.parametrize("lora", KINDS.values(), ids=KINDS)
def test_whole_weights_become_the_base_and_the_adapter_adds_nothing(make_engine, batch, lora):
    other = make_engine("llama", model={"seed": 3})
    engine = trained(make_engine, batch, lora=lora)
    engine.load_named_weights(other.named_weights())
    expected = log_probs(other, batch)
    torch.testing.assert_close(log_probs(engine, batch), expected, rtol=0, atol=1e-5)
    assert torch.equal(log_probs(engine, batch, adapter=False), expected)
    engine.forward_backward(batch, NLL)
    assert engine.optimizer_step().grad_norm > 0


@pytest.mark.parametrize("lora", KINDS.values(), ids=KINDS)
def test_whole_weights_are_mixed_with_the_merged_ones(make_engine, batch, lora):
    engine, other = (
        trained(make_engine, batch, lora=lora),
        dict(make_engine("llama", model={"seed": 3}).named_weights()),
    )
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.load_named_weights(other.items(), mix=0.25)
    for name, tensor in engine.named_weights():
        expected = 0.75 * before[name] + 0.25 * other[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-5, msg=name)


def test_an_embedding_with_an_adapter_still_learns_after_whole_weights_came(make_engine, batch):
    engine = trained(make_engine, batch, lora={"target_modules": ["embed_tokens"]})
    assert log_probs(engine, batch).ne(log_probs(engine, batch, adapter=False)).any()
    merged = dict(engine.named_weights())
    plain = make_engine("llama")
    plain.load_named_weights(merged.items())
    torch.testing.assert_close(log_probs(engine, batch), log_probs(plain, batch), rtol=0, atol=1e-4)
    engine.load_named_weights(merged.items())
    engine.forward_backward(batch, NLL)
    assert engine.optimizer_step().grad_norm > 0


def test_a_stream_that_lacks_a_tensor_of_the_adapter_is_refused(make_engine, batch):
    engine = trained(make_engine, batch)
    tensors = {name: tensor.clone() for name, tensor in engine.named_weights(adapter=True)}
    last = tensors.popitem()[0]
    with pytest.raises(DataError, match="did not come"):
        engine.load_named_weights(tensors.items())
    with pytest.raises(DataError, match="Unknown weight"):
        engine.load_named_weights([*tensors.items(), (last + "x", torch.zeros(1))])


# -- state ------------------------------------------------------------------------


def test_a_checkpoint_holds_the_adapter_only_and_goes_on_bit_for_bit(make_engine, batch, tmp_path):
    straight = trained(make_engine, batch)
    straight.save(tmp_path / "state").result()
    saved = load_file(tmp_path / "state" / "weights.safetensors")
    assert saved.keys() == dict(straight.named_weights(adapter=True)).keys()
    resumed = make_engine("llama", lora=KINDS["plain"], model={"seed": 0})
    resumed.load(tmp_path / "state")
    for _ in range(2):
        losses = [engine.forward_backward(batch, NLL).loss for engine in (straight, resumed)]
        assert losses[0] == losses[1]
        assert straight.optimizer_step() == resumed.optimizer_step()
    assert torch.equal(log_probs(straight, batch), log_probs(resumed, batch))


def test_a_checkpoint_over_another_base_is_refused(make_engine, batch, tmp_path):
    trained(make_engine, batch).save(tmp_path / "state").result()
    other = make_engine("llama", lora=KINDS["plain"], model={"seed": 1})
    with pytest.raises(DataError, match=r"holds an adapter of another base model than .*Bring the base back"):
        other.load(tmp_path / "state")
    with pytest.raises(DataError, match=r"holds an adapter, but this run has no \[actor\.lora\]"):
        make_engine("llama").load(tmp_path / "state")
    make_engine("llama").save(tmp_path / "whole").result()
    with pytest.raises(DataError, match=r"holds a whole model, but this run has an \[actor\.lora\]"):
        other.load(tmp_path / "whole")


def test_a_base_is_known_again_in_another_type_and_after_training(make_engine, batch):
    engine = make_engine("llama", lora=KINDS["plain"])
    before = engine.adapter.base_identity()
    assert trained(make_engine, batch).adapter.base_identity() == before
    assert make_engine("llama", lora={"rank": 2}, param_dtype="bf16").adapter.base_identity() == before
    assert make_engine("llama", lora={}, model={"seed": 1}).adapter.base_identity() != before
    engine.load_named_weights(make_engine("llama", model={"seed": 1}).named_weights())
    assert engine.adapter.base_identity() != before


def test_an_engine_that_slept_goes_on_as_if_it_had_not(make_engine, batch):
    awake, slept = trained(make_engine, batch), trained(make_engine, batch)
    slept.sleep()
    slept.wake()
    for engine in (awake, slept):
        engine.forward_backward(batch, NLL)
        engine.optimizer_step()
    assert torch.equal(log_probs(awake, batch), log_probs(slept, batch))


@pytest.mark.parametrize("lora", [KINDS["plain"], KINDS["rslora"], KINDS["with a module"]])
def test_the_gradient_is_that_of_the_merged_model_by_the_chain_rule(make_engine, batch, lora):
    """With G the gradient at ``W + s B A``: that of B is ``s G A^T``, that of A is ``s B^T G``."""
    engine = trained(make_engine, batch, lora=lora, optim={"max_grad_norm": 0})
    model = AutoModelForCausalLM.from_config(engine.module.config, dtype=torch.float64).eval()
    model.load_state_dict(by_hand(engine, lora))
    with torch.enable_grad():
        (-alone(model, batch, grad=True) * batch["weights"]).sum().backward()
    engine.forward_backward(batch, NLL)
    scale = 32 / 4**0.5 if lora.get("rslora") else 32 / 4
    compared = 0
    for name, layer in engine.module.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        whole = model.get_parameter(f"{name}.weight").grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        for found, expected in (
            (b.grad, scale * whole @ a.double().cpu().T),
            (a.grad, scale * b.double().cpu().T @ whole),
        ):
            torch.testing.assert_close(
                found.double().cpu(), expected, rtol=1e-3, atol=1e-5 * float(expected.detach().norm())
            )
            compared += 1
    assert compared == 28
    squares = sum(
        float(p.grad.double().square().sum()) for p in engine.module.parameters() if p.requires_grad
    )
    assert engine.optimizer_step().grad_norm == pytest.approx(squares**0.5, rel=1e-5)
