"""Weights that come in another order than they are asked for."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from engine_core.errors import DataError
from engine_plugin_megatron.reading import FromStream, blank_module

SHAPES = dict.fromkeys("abcd", (2,))
ALL = (slice(0, 2),)


def stream(names, read=None):
    for number, name in enumerate(names):
        if read is not None:
            read.append(name)
        yield name, torch.full((2,), float(number))


def test_each_is_given_as_often_as_it_is_wanted_and_not_kept_after():
    read = FromStream(stream("abcd"), SHAPES, {"c": 2, "b": 1})
    assert read("c", ALL).tolist() == [2.0, 2.0]
    assert sorted(read._kept) == ["b", "c"], "what nobody here asks for is not kept"
    assert read("b", ALL).tolist() == [1.0, 1.0]
    read("c", ALL)
    assert not read._kept
    read.finish()


def test_a_stream_is_run_to_its_end_since_other_ranks_take_part():
    taken = []
    read = FromStream(stream("abcd", taken), SHAPES, {"a": 1})
    read("a", ALL)
    read.finish()
    assert taken == list("abcd")
    assert not read._kept


def test_what_does_not_come_or_is_unknown_is_told():
    with pytest.raises(DataError, match="The weight 'd' did not come"):
        FromStream(stream("abc"), SHAPES, {"d": 1})("d", ALL)
    with pytest.raises(DataError, match="1 of 4 weights did not come: d"):
        FromStream(stream("abc"), SHAPES, {}).finish()
    with pytest.raises(DataError, match="Unknown weight 'e'"):
        FromStream(stream("abcde"), SHAPES, {}).finish()


def test_a_model_of_a_hub_name_has_its_generation_config(monkeypatch):
    hub = {"org/name": GenerationConfig(eos_token_id=[2, 7])}
    monkeypatch.setattr(GenerationConfig, "from_pretrained", hub.__getitem__)
    config = LlamaConfig(vocab_size=97, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    assert blank_module(config, "actor", "org/name").generation_config.eos_token_id == [2, 7]
    assert blank_module(config, "actor").generation_config.eos_token_id == 2  # of the config
