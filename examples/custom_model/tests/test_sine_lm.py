"""The conformance kit on a transformers class with a model type of its own: its folders, and what it is compared with."""

import pytest
import torch

from engine_plugin_custom_model.sine_lm import SineConfig, SineForCausalLM
from engine_plugin_testing import TrainEngineSuite

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def write(folder, model, seed, tied):
    """write_model: random weights, and norms and frequencies around 1."""
    torch.manual_seed(seed)
    made = SineForCausalLM(SineConfig(**{key: model[key] for key in SIZES if key in model}))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.2)
    made.save_pretrained(folder)


def load(path):
    """reference: the module of a folder, in float64."""
    return SineForCausalLM.from_pretrained(path).double()


@pytest.mark.slow
class TestSineLM(TrainEngineSuite):
    backend = "torch"
    plugins = ["sine_lm"]
    write_model = "test_sine_lm.py:write"
    reference = "test_sine_lm.py:load"


@torch.no_grad()
def test_packed_sequences_are_apart_and_a_cache_changes_nothing():
    model = SineForCausalLM(SineConfig(vocab_size=31)).double()
    one, other = torch.tensor([[3, 7, 1, 9]]), torch.tensor([[5, 2, 30]])
    alone = [model(ids, torch.arange(ids.shape[1])[None]).logits[0] for ids in (one, other)]
    packed = model(torch.cat([one, other], 1), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone))

    padded = torch.tensor([[0, 5, 2], [3, 7, 1]])
    mask, places = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([[1, 0, 1], [0, 1, 2]])
    begun = model(padded, places, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(begun.logits[0, 1:], alone[1][:2])
    longer = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    more = model(torch.tensor([[30], [9]]), torch.tensor([[2], [3]]), longer, begun.past_key_values)
    torch.testing.assert_close(more.logits[:, 0], torch.stack([alone[1][2], alone[0][3]]))
