"""The memory of a role before it is built, against engines that are built."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from engine_core.config import ModelConfig, RoleConfig
from engine_core.config.roles import LoRAConfig
from engine_core.contracts.memory import MemoryQuestion
from engine_core.types import LossCall
from engine_plugin_torch import memory
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.memory import Decoder, activations, optimizer_bytes
from engine_plugin_torch.memory_need import quantized_bytes, sketch
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.quantized_linear import pack

CPU = torch.device("cpu")
FP32 = {"param_dtype": "fp32", "compute_dtype": "fp32", "compile": False}
ASK = MemoryQuestion("actor", trainable=True, device_bytes=1 << 30, tokens=4096, length=64)


def need_of(path, question=ASK, lora=None, tokens=512, **options):
    config = RoleConfig(
        max_tokens_per_rank=tokens,
        lora=None if lora is None else LoRAConfig(**lora),
        options=TorchOptions(**{**FP32, **options}),
    )
    return TorchEngine.memory_need(config, ModelConfig(path=str(path)), question)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_gradients_and_optimizer_are_those_of_the_built_engine(
    make_engine, model_folder, batch_of, family, lora
):
    engine = make_engine(family, lora=lora)
    engine.forward_backward(batch_of([30, 20]), LossCall("nll"))
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    engine.optimizer_step()
    need = need_of(model_folder(family), lora=lora)
    assert need.kept == {"weights": sum(p.numel() * p.itemsize for p in engine.module.parameters())}
    assert need.working["gradients"] == sum(g.numel() * g.itemsize for g in gradients)
    assert need.idle["optimizer"] == optimizer_bytes(engine.optimizer, CPU) - 4 * len(gradients)


def test_a_role_that_is_not_trained_has_neither_gradients_nor_optimizer(model_folder):
    need = need_of(model_folder("qwen3"), MemoryQuestion("ref", frozen=True, tokens=4096), param_dtype="auto")
    assert need.idle == {}
    assert "gradients" not in need.working
    assert need.kept["weights"] == need_of(model_folder("qwen3")).kept["weights"]  # compute_dtype says fp32
    half = need_of(
        model_folder("qwen3"),
        MemoryQuestion("ref", frozen=True, tokens=4096),
        param_dtype="auto",
        compute_dtype="auto",
    )
    assert half.kept["weights"] == need.kept["weights"] // 2  # bfloat16, on an accelerator


def terms(path, **options):
    module, _ = sketch(RoleConfig(), ModelConfig(path=str(path)), "actor", torch.float32)
    made = TorchOptions(**{**FP32, **options})
    types = dataclasses.make_dataclass("Types", ["param", "compute"])(torch.float32, torch.float32)
    how = TorchEngine.budget_class.settings_of(module, made, types, "actor", False, False)
    return activations(Decoder.of(module), how)


def test_activations_are_those_of_the_largest_micro_batch(model_folder):
    path = model_folder("qwen3")
    act, options = terms(path), {"activation_checkpointing": False}
    assert need_of(path, **options).working["activations"] == 512 * act.token(False)
    recomputed = need_of(path, activation_checkpointing=True)
    assert recomputed.working["activations"] == 512 * act.token(True)
    few = need_of(path, dataclasses.replace(ASK, tokens=300), **options)
    assert few.working["activations"] == 300 * act.token(False)  # all tokens of a mini-batch
    long = need_of(path, dataclasses.replace(ASK, length=900), **options)
    assert long.working["activations"] == 900 * act.token(False)  # a sequence is not cut


def test_gradients_of_one_micro_batch_take_the_place_of_its_activations(model_folder):
    path = model_folder("qwen3")
    one = need_of(path, dataclasses.replace(ASK, tokens=512), activation_checkpointing=False)
    several = need_of(path, activation_checkpointing=False)
    kept = several.working["activations"] + several.working["logits"]
    assert one.working["gradients"] == max(0, several.working["gradients"] - kept)


def test_auto_takes_the_tokens_that_a_run_would_take(model_folder):
    path = model_folder("qwen3")
    act, need = terms(path), need_of(path)
    held = need.kept["weights"] + need.idle["optimizer"] + need.working["gradients"]
    room = int((act.constant + 3000 * act.token(False)) / (1 - memory.RESERVE))
    ask = dataclasses.replace(ASK, tokens=None, length=None, free=held + room)
    found = need_of(path, ask, tokens="auto", activation_checkpointing=False)
    assert found.chosen == {"max_tokens_per_rank": 2560}  # 3000, a multiple of 512
    assert found.working["activations"] == 2560 * act.token(False)
    assert sum(found.working.values()) + held - found.working["gradients"] + found.reserve <= ask.free
    scarce = need_of(path, ask, tokens="auto", activation_checkpointing="auto")
    assert scarce.chosen["torch.activation_checkpointing"] is True
    assert scarce.chosen["max_tokens_per_rank"] > 2560
    assert scarce.least < sum(scarce.working.values())


def test_activations_are_recomputed_where_the_longest_sequence_would_else_not_fit(model_folder):
    path = model_folder("qwen3")
    act, need = terms(path), need_of(path)
    held = need.kept["weights"] + need.idle["optimizer"] + need.working["gradients"]
    room = int((act.constant + (memory.FEW + 600) * act.token(False)) / (1 - memory.RESERVE))

    def recomputed(length, tokens=None):
        ask = dataclasses.replace(ASK, tokens=tokens, length=length, free=held + room)
        need = need_of(path, ask, tokens="auto", activation_checkpointing="auto")
        return need.chosen["torch.activation_checkpointing"]

    assert not recomputed(memory.FEW + 500)
    assert recomputed(memory.FEW + 700)
    assert not recomputed(memory.FEW + 700, tokens=memory.FEW + 500)  # the mini-batch has no such sequence


@pytest.mark.parametrize("method", ["int8", "nf4"])
def test_quantized_weights_are_counted_to_the_byte(model_folder, method):
    if method == "nf4":
        pytest.importorskip("bitsandbytes")
    for shape in ((64, 160), (7, 33), (128, 256)):
        weight = torch.randn(shape)
        assert quantized_bytes(weight, method) == sum(piece.nbytes for piece in pack(weight, method).values())
    whole, saved = sketch(
        RoleConfig(), ModelConfig(path=str(model_folder("qwen3"))), "ref", torch.float32, method
    )
    linear = [m for m in whole.modules() if isinstance(m, nn.Linear) and m is not whole.lm_head]
    assert saved == sum(m.weight.nbytes - quantized_bytes(m.weight, method) for m in linear)


def test_what_is_unknown_is_said(model_folder):
    assert need_of(model_folder("qwen3_moe")).unknown == ("activations",)


def test_a_role_on_another_device_has_no_estimate(model_folder):
    assert need_of(model_folder("qwen3"), device="cpu") is None
    assert need_of(model_folder("qwen3"), device="cuda:1") is None
