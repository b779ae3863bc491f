"""The cache with room, beside the one of transformers."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, MistralConfig, Qwen3Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from engine_plugin_hf_rollout.cache import LEAST_ROOM, RoomyLayer, make_cache

CONFIG = Qwen3Config(num_hidden_layers=2)


def states(generator, batch, tokens):
    return [torch.randn(batch, 2, tokens, 4, generator=generator) for _ in range(2)]


def test_every_token_gives_what_the_cache_of_transformers_gives():
    """Past the room of the first buffer, with rows put away in between."""
    ours, theirs, generator = (
        make_cache(CONFIG),
        DynamicCache(config=CONFIG),
        torch.Generator().manual_seed(0),
    )
    batch = 5
    for step in range(2 * LEAST_ROOM):
        for layer in range(2):
            new = states(generator, batch, 1 if step else 7)
            for found, expected in zip(ours.update(*new, layer), theirs.update(*new, layer), strict=True):
                assert torch.equal(found, expected)
        assert ours.get_seq_length() == theirs.get_seq_length()
        if step in (0, 3):
            rows = torch.tensor([0, 2, 2, 4]) if step else torch.tensor([0, 0, 1, 2, 3, 4])
            batch = len(rows)
            for cache in (ours, theirs):
                cache.batch_select_indices(rows)


def test_a_token_is_written_into_the_buffer_that_is_there():
    cache, generator = make_cache(CONFIG), torch.Generator().manual_seed(0)
    first, _ = cache.update(*states(generator, 3, 7), 0)
    again, _ = cache.update(*states(generator, 3, 1), 0)
    assert again.data_ptr() == first.data_ptr()


def test_layers_with_a_window_stay_as_they_are():
    config = MistralConfig(num_hidden_layers=1, sliding_window=4)
    assert [type(layer) for layer in make_cache(config).layers] == [DynamicSlidingWindowLayer]
    assert [type(layer) for layer in make_cache(CONFIG).layers] == [RoomyLayer] * 2


def test_under_autocast_keys_are_kept_in_its_type_and_attention_gives_the_same():
    """Keys behind a norm and rotary embeddings of float32 weights are float32, values are bfloat16."""
    ours, theirs, generator = (
        make_cache(CONFIG),
        DynamicCache(config=CONFIG),
        torch.Generator().manual_seed(0),
    )
    query = torch.randn(3, 2, 1, 4, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        for tokens in (7, 1):
            keys, values = states(generator, 3, tokens)
            found, expected = (cache.update(keys, values.bfloat16(), 0) for cache in (ours, theirs))
        assert [kept.dtype for kept in found] == [torch.bfloat16] * 2
        assert torch.equal(
            scaled_dot_product_attention(query, *found), scaled_dot_product_attention(query, *expected)
        )
