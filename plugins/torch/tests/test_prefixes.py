"""Shared prefixes of sequences, against each sequence alone."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core.types import Batch
from engine_plugin_torch.attention import find_prefixes
from engine_plugin_torch.packed_forward import PackedForward

CPU = torch.device("cpu")
PROMPTS = [list(range(10, 20)), list(range(30, 37)), list(range(50, 53))]
RESPONSES = [[[1, 2, 3], [1, 5], [6, 7, 8, 9, 1, 2, 3, 4]], [[4, 5, 6, 7], [5]], [[1, 2], [3, 4]]]
SEQUENCES = [
    prompt + response for prompt, group in zip(PROMPTS, RESPONSES, strict=True) for response in group
]
SHARED = 11 + 10 + 7 + 3  # the second response begins as the first does


def pack(sequences, prompts):
    mask = [i >= n for row, n in zip(sequences, prompts, strict=True) for i in range(len(row))]
    ids = torch.tensor([token for row in sequences for token in row])
    return Batch(ids, torch.tensor([len(row) for row in sequences]), {"loss_mask": torch.tensor(mask)}, {})


def found_in(rows):
    return find_prefixes(
        torch.tensor([token for row in rows for token in row]), torch.tensor([len(row) for row in rows])
    )


def model_of(folder, attention="varlen"):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    config.sliding_window = 6
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def test_a_prefix_is_kept_once_and_found_by_every_token_like_it():
    ids = torch.tensor([token for row in SEQUENCES for token in row])
    found = found_in(SEQUENCES)
    assert torch.equal(ids[found.kept][found.row], ids)
    assert len(found.kept) == len(ids) - SHARED


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[5, 6, 7], [5, 6, 7]], [0, 1, 2, 0, 1, 2]),  # equal sequences
        ([[5, 6, 7], [5, 6], [5, 6, 8]], [0, 1, 2, 0, 1, 0, 1, 3]),
        ([[5, 6], [5, 6, 7], [5, 6, 7]], [0, 1, 0, 1, 2, 0, 1, 2]),
        ([[5, 6, 7], [5, 9, 7]], [0, 1, 2, 0, 3, 4]),  # equal tokens behind another one
    ],
)
def test_each_token_has_the_row_of_the_first_one_behind_the_same_prefix(rows, expected):
    assert found_in(rows).row.tolist() == expected


@pytest.mark.parametrize("rows", [[[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]], [[1], [2], [1]]])
def test_nothing_in_common_is_none(rows):
    assert found_in(rows) is None


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("recompute", [True, False])
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(model_folder, family, recompute):
    """In float64; mistral has a sliding window, gemma2 a soft cap and a window."""
    model = model_of(model_folder(family)).double()
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


@pytest.mark.parametrize("share", [True, False])
def test_layers_see_a_prefix_once(model_folder, share):
    model = model_of(model_folder("qwen3"))
    forward = PackedForward(model, CPU, torch.float32, chunk=64, share=share)
    forward.settle()
    widths = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: widths.append(ids[0].shape[1]))
    batch = pack(SEQUENCES, [1] * len(SEQUENCES))
    forward(batch, ("log_probs",))
    assert widths == [batch.num_tokens - SHARED * share]


def test_other_attention_shares_nothing(model_folder):
    model = model_of(model_folder("qwen3"), "sdpa")
    assert not PackedForward(model, CPU, torch.float32, chunk=64, share=True).shares


def test_a_model_that_reads_the_row_before_a_token_shares_nothing(model_folder, caplog):
    """Its rows stay apart in a pack, where positions begin again, but behind a shared prefix another row comes before."""
    model = model_of(model_folder("qwen3"))
    decoder = model.get_decoder()
    own = decoder.forward

    def forward(input_ids, position_ids, **kwargs):
        output = own(input_ids=input_ids, position_ids=position_ids, **kwargs)
        rows = output.last_hidden_state
        output.last_hidden_state = rows + rows.roll(1, 1) * (position_ids > 0)[..., None]
        return output

    decoder.forward = forward
    batch = pack(SEQUENCES, [1] * len(SEQUENCES))
    expected, found = (
        PackedForward(model, CPU, torch.float32, chunk=64, share=share) for share in (False, True)
    )
    with caplog.at_level(logging.WARNING, "engine"):
        log_probs = found(batch, ("log_probs",))["log_probs"]
    assert found.packs
    assert "Qwen3ForCausalLM computes shared prefixes for each sequence." in caplog.text
    assert torch.equal(log_probs, expected(batch, ("log_probs",))["log_probs"])


@pytest.mark.skipif(os.environ.get("ENGINE_TEST_DEVICE", "cpu") != "cpu", reason="only a CPU shares prefixes")
def test_the_option_decides(make_engine):
    assert make_engine("qwen3").forward.shares
    assert not make_engine("qwen3", share_prefixes=False).forward.shares
