"""Merged adapters are the same model, and nothing of a layer is held longer than it takes."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from engine_core.config import ModelConfig
from engine_core.contracts.weight_names import own_weights
from engine_plugin_custom_model.adapter_lm import WithAdapter, build, merged


def models(folder):
    """The ordinary model of a folder, and the one with adapters that change it."""
    config = Qwen3Config(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    adapted = build(ModelConfig(path=str(folder)))
    for part in adapted.modules():
        if isinstance(part, WithAdapter):
            torch.nn.init.normal_(part.up.weight, std=0.3)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapted


@torch.no_grad()
def test_merged_weights_make_the_ordinary_model_the_adapted_one(tmp_path):
    plain, adapted = models(tmp_path)
    ids = torch.tensor([[3, 7, 1, 9, 30]])
    expected = adapted(input_ids=ids).logits
    assert (plain(input_ids=ids).logits - expected).abs().max() > 1e-3
    plain.load_state_dict(dict(merged(own_weights(adapted).items())), strict=False)
    assert torch.allclose(plain(input_ids=ids).logits, expected, atol=1e-5)


@torch.no_grad()
def test_the_names_are_those_of_the_ordinary_model(tmp_path):
    plain, adapted = models(tmp_path)
    names = [name for name, _ in merged(own_weights(adapted).items())]
    assert sorted(names) == sorted(own_weights(plain))


@torch.no_grad()
def test_an_export_of_the_adapted_model_is_built_again(tmp_path):
    _, adapted = models(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "export")
    again = build(ModelConfig(path=str(tmp_path / "export")))
    ids = torch.tensor([[3, 7, 1, 9, 30]])
    assert torch.equal(again(input_ids=ids).logits, adapted(input_ids=ids).logits)


def test_an_adapter_adds_nothing_at_first():
    block = WithAdapter(torch.nn.Linear(4, 4), 4)
    hidden = torch.randn(3, 4)
    assert torch.equal(block(hidden), block.inner(hidden))
