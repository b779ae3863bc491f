"""Types and quantised layers on an accelerator: what ``auto`` gives, the same pieces as on the CPU, QLoRA."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.config.roles import LoRAConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, LossCall
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.precision import Precision, has_bf16
from engine_plugin_torch.quantized_linear import QuantizedLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]
FOUR_BITS = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")
METHODS = ["int8", "fp8", pytest.param("nf4", marks=FOUR_BITS), pytest.param("fp4", marks=FOUR_BITS)]
FP32, BF16 = torch.float32, torch.bfloat16


def accelerator():
    return torch.accelerator.current_accelerator()


@pytest.fixture
def make_engine(tmp_path):
    LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    ).save_pretrained(tmp_path)

    def make(trainable=True, lora=None, frozen=False, role="actor", **options):
        config = RoleConfig(
            optim=OptimConfig(lr=1e-2),
            lora=lora and LoRAConfig(**lora),
            options=TorchOptions(**{"compile": False, **options}),
        )
        context = WorkerContext(
            plugins=PluginSet.load({"train_engines": {"torch"}}),
            role=role,
            device=accelerator(),
            total_steps=10,
            frozen=frozen,
        )
        return TorchEngine(config, ModelConfig(path=str(tmp_path)), context, trainable=trainable)

    return make


def batch():
    mask = (torch.arange(128) >= 8).repeat(4)
    tokens = {"loss_mask": mask, "weights": mask / mask.sum(), "token_share": mask / mask.sum()}
    ids = torch.randint(512, (512,), generator=torch.Generator().manual_seed(1))
    return Batch(ids, torch.tensor([128] * 4), tokens)


def test_auto_trains_float32_in_bfloat16_and_keeps_frozen_weights_in_bfloat16(make_engine):
    if not has_bf16(accelerator()):
        pytest.skip("no bfloat16")
    trained, frozen = make_engine(), make_engine(trainable=False, frozen=True, role="ref")
    assert trained.precision == Precision(FP32, BF16)
    assert frozen.precision == Precision(BF16, BF16)
    assert {p.dtype for p in trained.module.parameters()} == {FP32}
    assert {p.dtype for p in frozen.module.parameters()} == {BF16}
    found, exact = (e.infer(batch(), ["log_probs"])["log_probs"] for e in (frozen, trained))
    assert (found - exact).abs().mean() < 0.02


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_pieces_are_those_of_the_cpu(method, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(320, 96, bias=False, dtype=dtype).requires_grad_(False)
    here = QuantizedLinear(layer, method).weight.float()
    there = QuantizedLinear(layer.to(accelerator()), method).weight.float().cpu()
    assert (here != there).float().mean() < 0.001  # a tie may be rounded the other way
    torch.testing.assert_close(there, here, rtol=0, atol=0.2 * float(here.abs().max()))


@pytest.mark.parametrize("method", METHODS)
def test_product_and_gradient_are_those_of_the_rounded_weight(method):
    torch.manual_seed(0)
    layer = nn.Linear(320, 96, dtype=BF16, device=accelerator()).requires_grad_(False)
    quantized = QuantizedLinear(layer, method)
    x = torch.randn(7, 320, dtype=BF16, device=accelerator(), requires_grad=True)
    y = quantized(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    weight = quantized.dequantized(torch.float64)
    expected = x.double() @ weight.T + layer.bias.double()
    assert (y.double() - expected).norm() / expected.norm() < 0.01
    assert (found.double() - weight.sum(0)).norm() / (weight.sum(0).norm() * 7**0.5) < 0.01


@pytest.mark.parametrize("method", METHODS)
def test_qlora_learns_saves_and_is_sampled_as_it_is_trained(make_engine, tmp_path, method):
    engine = make_engine(lora={"rank": 8}, quantize=method)
    assert engine.change.bytes_after < 0.75 * engine.change.bytes_before
    data, losses = batch(), []
    for _ in range(8):
        losses.append(engine.forward_backward(data, LossCall("nll")).loss)
        engine.optimizer_step()
    assert losses[-1] < 0.9 * losses[0]
    expected = engine.infer(data, ["log_probs"])["log_probs"]
    engine.save(tmp_path / "saved").result()
    other = make_engine(lora={"rank": 8}, quantize=method)
    other.load(tmp_path / "saved")
    assert torch.equal(other.infer(data, ["log_probs"])["log_probs"], expected)
    merged = make_engine(trainable=False, role="ref", param_dtype="fp32", compute_dtype="fp32")
    merged.load_named_weights(engine.named_weights())
    assert (merged.infer(data, ["log_probs"])["log_probs"] - expected).abs().mean() < 0.1


@pytest.mark.parametrize("method", METHODS)
def test_the_whole_model_is_never_on_the_device(make_engine, method):
    make_engine(trainable=False, role="ref", frozen=True, quantize=method)  # the libraries' own memory
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    engine = make_engine(trainable=False, role="ref", frozen=True, quantize=method)
    most = torch.accelerator.max_memory_allocated() - before
    assert most < engine.change.bytes_before
