"""Attention 'varlen' against one dense masked softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from engine_core.errors import ConfigError
from engine_plugin_torch import attention

LENGTHS = [5, 1, 17, 4, 5, 30]


@pytest.fixture
def pack():
    """Queries of 4 heads, keys and values of 2, for 62 tokens."""
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    return [torch.randn(1, heads, total, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]


def dense(query, key, value, window, softcap, scaling):
    """The same in float64 by one [T, T] mask."""
    q, k, v = query.double(), key.double().repeat_interleave(2, 1), value.double().repeat_interleave(2, 1)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    row, column = torch.arange(len(sequence))[:, None], torch.arange(len(sequence))[None]
    seen = (sequence[:, None] == sequence[None]) & (column <= row) & (row - column < (window or 1000))
    scores = q @ k.transpose(-1, -2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 1.5), (6, 1.5)])
def test_a_pack_is_what_a_dense_mask_gives(pack, window, softcap):
    arguments = attention.packed_arguments(torch.tensor(LENGTHS), torch.device("cpu"))
    found, _ = attention.varlen(
        nn.Module(), *pack, None, scaling=0.4, sliding_window=window, softcap=softcap, **arguments
    )
    expected = dense(*pack, window, softcap, 0.4)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((found * direction).sum(), pack)
    expected = torch.autograd.grad((expected * direction).sum(), pack)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_pack_of_other_lengths_needs_no_further_graph():
    """Otherwise each number of rectangles has a graph, which takes minutes to compile."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, dynamic=True)
    def layer(query, key, value, **arguments):
        out, _ = attention.varlen(
            module, query + 1, key, value, None, sliding_window=6, softcap=1.5, **arguments
        )
        return 2 * out

    module, seen = nn.Module(), []
    for lengths in ([9, 9], [12, 5], [20, 12, 7]):  # 1, 2 and 3 rectangles
        heads = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
        layer(*heads, **attention.packed_arguments(torch.tensor(lengths), torch.device("cpu")))
        seen.append(len(graphs))
    assert 0 < seen[1] == seen[-1]


def test_boundaries_alone_are_enough(pack):
    cu = torch.tensor([0, 5, 6, 23, 27, 32, 62], dtype=torch.int32)
    found, _ = attention.varlen(nn.Module(), *pack, None, scaling=0.4, cu_seq_lens_q=cu)
    torch.testing.assert_close(found.double(), dense(*pack, None, None, 0.4), rtol=1e-5, atol=1e-6)


def test_a_rectangle_holds_sequences_of_similar_length_only():
    plan = attention._plan([0, 10, 19, 27, 34, 134], torch.device("cpu"))  # lengths 10 9 8 7 100
    assert [(r.count, r.length, len(r.valid)) for r in plan.rectangles] == [
        (1, 100, 100),
        (3, 10, 27),
        (1, 7, 7),
    ]


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_padded_batches_and_caches_are_those_of_eager(model_folder, family):
    config = AutoConfig.from_pretrained(model_folder(family))
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="varlen").eval()
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(1, 97, (2, 12))
    ids[0, :5] = 0
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**inputs).logits[:, 5:], eager(**inputs).logits[:, 5:], rtol=1e-4, atol=1e-5
        )
        arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        assert torch.equal(ours.generate(**inputs, **arguments), eager.generate(**inputs, **arguments))


def test_positions_that_begin_again_keep_sequences_apart_without_boundaries_too():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="varlen").eval()
    ids = torch.randint(0, 50, (1, 9))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 5:]
    alone = model(input_ids=ids[:, 5:], use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


def test_attention_sinks_are_refused(pack):
    with pytest.raises(ConfigError, match=r"'varlen' has no attention sinks.*Use 'eager'"):
        attention.varlen(nn.Module(), *pack, None, s_aux=torch.zeros(4))


def test_an_implementation_that_may_mix_sequences_is_refused():
    with pytest.raises(
        ConfigError, match=r"model.attention is 'spda', which is not known .* Did you mean 'sdpa'\?"
    ):
        attention.check_attention("spda", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"'flex_attention' has no backward pass on the CPU. Use 'varlen'"):
        attention.check_attention("flex_attention", torch.device("cpu"))


def test_under_autocast_a_pack_is_computed_in_its_type(pack):
    """Rotary embeddings of float32 weights give float32, with which torch's kernel for packed sequences would not run."""
    arguments = attention.packed_arguments(torch.tensor(LENGTHS), torch.device("cpu"))
    half = [tensor.detach().bfloat16() for tensor in pack]
    expected, _ = attention.varlen(nn.Module(), *half, None, scaling=0.4, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attention.varlen(nn.Module(), *pack, None, scaling=0.4, **arguments)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(found.float().sum(), pack))


@pytest.mark.parametrize("masked", [None, torch.bool, torch.bfloat16])
def test_one_token_sees_turned_keys_as_it_sees_others(masked):
    """Four heads of queries, two of keys; the first row has two tokens of padding."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(3, heads, length, 8, generator=generator).bfloat16()
        for heads, length in ((4, 1), (2, 9), (2, 9))
    )
    seen = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    seen[0, ..., :2] = False
    mask = seen
    if masked is None:
        seen, mask = torch.ones_like(seen), None
    elif masked == torch.bfloat16:
        mask = torch.zeros(seen.shape, dtype=masked).masked_fill(~seen, torch.finfo(masked).min)
    turned = keys.mT.contiguous().mT
    found, _ = attention.varlen(nn.Module(), query, turned, values, mask, scaling=0.4)
    shares = (query.double() @ keys.double().repeat_interleave(2, 1).mT * 0.4).masked_fill(~seen, -torch.inf)
    expected = shares.softmax(-1) @ values.double().repeat_interleave(2, 1)
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=0.02, atol=0.02)
