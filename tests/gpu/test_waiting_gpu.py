"""How often a training step waits for the device: twice, however many micro-batches it has.

pytest -m gpu tests/gpu/test_waiting_gpu.py
"""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import Qwen3Config

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, LossCall
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.options import TorchOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: it tells what waits"),
]

POLICY = LossCall(
    "policy", {"loss": "ppo_clip", "loss_options": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}}
)


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def engine(request, tmp_path):
    Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = RoleConfig(
        max_tokens_per_rank=256, optim=OptimConfig(lr=1e-4), options=TorchOptions(compile=request.param)
    )
    context = WorkerContext(
        plugins=PluginSet.load({"train_engines": ["torch"], "losses": ["ppo_clip"]}),
        role="actor",
        device=torch.device("cuda", 0),
    )
    made = TorchEngine(config, ModelConfig(path=str(tmp_path)), context)
    yield made
    made.close()


def batch_of(sequences):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((sequences,), 64)
    total = 64 * sequences
    mask = (torch.arange(total) % 64) >= 16
    share = mask.float() / mask.sum()
    return Batch(
        torch.randint(0, 512, (total,), generator=generator),
        lengths,
        tokens={
            "loss_mask": mask,
            "weights": share,
            "token_share": share,
            "advantages": torch.randn(total, generator=generator),
            "old_log_probs": torch.full((total,), -6.2),
            "rollout_log_probs": torch.full((total,), -6.2),
        },
        sequences={"group_ids": torch.arange(sequences)},
    )


def waits_of(call):
    """Sentences of torch about what waited for the device in a call."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


@pytest.mark.parametrize("loss", [LossCall("nll"), POLICY], ids=["nll", "policy"])
def test_a_step_waits_once_for_its_loss_and_once_for_its_norm(engine, loss):
    for sequences in (4, 12, 4):  # what is compiled or cached is there afterwards
        engine.forward_backward(batch_of(sequences), loss)
        engine.optimizer_step()
    for sequences in (4, 12):  # one micro-batch, three
        found = waits_of(lambda count=sequences: engine.forward_backward(batch_of(count), loss))
        assert len(found) == 1, found
        found = waits_of(engine.optimizer_step)
        assert len(found) == 1, found


def test_inference_waits_as_often_for_three_micro_batches_as_for_one(engine):
    outputs = ["log_probs", "entropy"]
    for sequences in (4, 12):  # what is compiled is there afterwards: the compiler waits, too
        engine.infer(batch_of(sequences), outputs)
    one, three = (waits_of(lambda count=count: engine.infer(batch_of(count), outputs)) for count in (4, 12))
    assert len(three) == len(one) <= 1, (one, three)


def test_loss_and_gradients_are_those_of_the_cpu(engine, tmp_path):
    """Copies that nobody waits for are in place when they are read."""
    batch = batch_of(12)
    found = engine.forward_backward(batch, POLICY)
    config = engine.config.model_copy(update={"options": TorchOptions(device="cpu", compile=False)})
    alone = TorchEngine(config, engine.model_config, engine.context)
    alone.load_named_weights((name, tensor.cpu()) for name, tensor in engine.named_weights())
    expected = alone.forward_backward(batch, POLICY)
    assert found.loss == pytest.approx(expected.loss, rel=0.02, abs=1e-3)
    for name, gradient in ((n, p.grad) for n, p in alone.module.named_parameters()):
        mine = engine.module.get_parameter(name).grad.cpu()
        assert float((mine - gradient).norm() / gradient.norm()) < 0.1, name
