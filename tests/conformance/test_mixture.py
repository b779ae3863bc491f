"""The kit's own experts, one after another, are the model that transformers computes from two tensors of all of them."""

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from engine_plugin_testing import reference
from engine_plugin_testing.mixture import split_experts

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
IDS = torch.arange(2, 40)


def test_experts_one_by_one_have_the_logits_and_gradients_of_fused_ones_under_the_names_of_a_folder(tmp_path):
    reference.write_model(tmp_path, MIXTURE, seed=0, tied=False)
    fused, own = AutoModelForCausalLM.from_pretrained(tmp_path), reference.load_reference(str(tmp_path))
    logits = [reference.logits_of(module, IDS) for module in (fused, own)]
    assert logits[1].dtype == torch.float64
    torch.testing.assert_close(logits[0].double(), logits[1], atol=1e-5, rtol=1e-5)
    with safe_open(tmp_path / "model.safetensors", "pt") as folder:
        assert {name for name, _ in own.named_parameters()} == set(folder.keys())
    gradients = [
        reference.gradient_of(module, one.square().mean())
        for module, one in zip((fused, own), logits, strict=True)
    ]
    for index in range(4):
        gate, up, down = (
            gradients[1][f"model.layers.0.mlp.experts.{index}.{part}_proj.weight"]
            for part in ("gate", "up", "down")
        )
        for name, expected in (("gate_up_proj", torch.cat([gate, up])), ("down_proj", down)):
            found = gradients[0][f"model.layers.0.mlp.experts.{name}"][index].double()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_model_without_experts_stays_as_it_is(tmp_path):
    reference.write_model(tmp_path, {}, seed=0, tied=True)
    module = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = [type(part) for part in module.modules()]
    assert [type(part) for part in split_experts(module).modules()] == names
