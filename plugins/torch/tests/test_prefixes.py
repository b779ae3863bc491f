"""Common beginnings of sequences, against each sequence alone."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core.types import Batch
from engine_plugin_torch.packed_forward import PackedForward
from engine_plugin_torch.prefixes import SHORTEST, find_prefixes

CPU = torch.device("cpu")
PROMPTS = [list(range(10, 20)), list(range(30, 37)), list(range(50, 50 + SHORTEST - 1))]
RESPONSES = [[[1, 2, 3], [1, 5], [6, 7, 8, 9, 1, 2, 3, 4]], [[4, 5, 6, 7], [5]], [[1, 2], [3, 4]]]
SEQUENCES = [
    prompt + response for prompt, group in zip(PROMPTS, RESPONSES, strict=True) for response in group
]


def pack(sequences, prompts):
    mask = [i >= n for row, n in zip(sequences, prompts, strict=True) for i in range(len(row))]
    ids = torch.tensor([token for row in sequences for token in row])
    return Batch(ids, torch.tensor([len(row) for row in sequences]), {"loss_mask": torch.tensor(mask)}, {})


def test_a_beginning_is_kept_once_and_found_by_every_token_like_it():
    ids = torch.tensor([token for row in SEQUENCES for token in row])
    found = find_prefixes(ids, torch.tensor([len(row) for row in SEQUENCES]))
    # the second response begins as the first does; the third group's prompt is too short
    assert found.shared == [0, 11, 10, 0, 7, 0, 0]
    assert torch.equal(ids[found.kept][found.row], ids)
    assert len(found.kept) == len(ids) - 28


def test_equal_sequences_keep_a_token_of_their_own():
    ids = torch.tensor([5, 6, 7, 8, 9] * 2)
    found = find_prefixes(ids, torch.tensor([5, 5]))
    assert found.shared == [0, 4]
    assert found.row.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 5]


@pytest.mark.parametrize("rows", [[[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]], [[1], [1], [1]]])
def test_nothing_in_common_is_none(rows):
    lengths = torch.tensor([len(row) for row in rows])
    assert find_prefixes(torch.tensor([token for row in rows for token in row]), lengths) is None


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("recompute", [True, False])
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(model_folder, family, recompute):
    """In float64; mistral has a sliding window, gemma2 a soft cap and a window."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder(family))
    config.sliding_window = 6
    model = AutoModelForCausalLM.from_config(config, attn_implementation="varlen").double().eval()
    prompts = [len(p) for p, group in zip(PROMPTS, RESPONSES, strict=True) for _ in group]
    batch = pack(SEQUENCES, prompts)
    forward = PackedForward(model, CPU, torch.float64, chunk=5, recompute=recompute, share=True)
    found = forward(batch, ("log_probs",))["log_probs"]
    assert forward.packs
    assert forward.shares
    direction = torch.randn(len(found), generator=torch.Generator().manual_seed(1)) * batch["loss_mask"]
    (found.double() * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected = []
    for row, prompt in zip(SEQUENCES, prompts, strict=True):
        logits = model(torch.tensor([row]), use_cache=False).logits[0]
        each = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row[1:])[:, None]).squeeze(1)
        expected.append(torch.cat([torch.zeros(prompt), each[prompt - 1 :]]))
    expected = torch.cat(expected)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    (expected * direction).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_layers_see_a_beginning_once(model_folder):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(model_folder("qwen3")), attn_implementation="varlen"
    ).eval()
    widths = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: widths.append(ids[0].shape[1]))
    batch = pack(SEQUENCES, [1] * len(SEQUENCES))
    for share in (True, False):
        forward = PackedForward(model, CPU, torch.float32, chunk=64, share=share)
        forward.settle()
        widths.clear()
        forward(batch, ("log_probs",))
        assert widths == [batch.num_tokens - (28 if share else 0)]


def test_other_attention_shares_nothing(model_folder):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(model_folder("qwen3")), attn_implementation="sdpa"
    )
    assert not PackedForward(model, CPU, torch.float32, chunk=64, share=True).shares
