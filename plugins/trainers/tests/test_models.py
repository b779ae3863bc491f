"""Which models fail beyond their positions."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engine_core.train.models import text_config
from engine_plugin_trainers.models import POSITION_TABLES, table_length

POSITIONS = 16
SMALL = {
    **{"vocab_size": 64, "max_position_embeddings": POSITIONS, "n_positions": POSITIONS},
    **{"hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32},
    **{"num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "attention_types": [[["global"], 2]]},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_head": 4, "rotary_dim": 4},
    **{"intermediate_size": 32, "n_inner": 32, "ffn_dim": 32, "dff": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def text_of(model):
    return text_config(None, None, model)


def tiny(kind):
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SMALL)).eval()


@pytest.mark.parametrize("kind", sorted(POSITION_TABLES))
def test_a_model_with_a_table_of_positions_computes_as_many_and_not_one_more(kind):
    model = tiny(kind)
    assert model.config.model_type == kind
    most = table_length(text_of(model))
    assert most == POSITIONS
    with torch.no_grad():
        model(input_ids=torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, most + 1), 5))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox", "bloom"])
def test_a_model_that_computes_positions_has_no_table_that_ends(kind):
    model = tiny(kind)
    assert table_length(text_of(model)) is None
    with torch.no_grad():
        model(input_ids=torch.full((1, POSITIONS + 1), 5))


def test_of_a_module_without_a_config_nothing_is_known():
    assert table_length(text_of(torch.nn.Linear(2, 2))) is None
