"""What is done with vLLM's own modules, on modules of the same structure."""

from types import SimpleNamespace

import pytest
from torch import nn

from engine_plugin_vllm_rollout.versions import refresh_tied_head


def text_model(tied: bool) -> nn.Module:
    """Return embeddings and a head with the names of vLLM's text models; ``refreshed`` counts what packs the head."""
    model = nn.Module()
    model.model, model.lm_head = nn.Module(), nn.Linear(4, 8, bias=False)
    model.model.embed_tokens = nn.Embedding(8, 4)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.refreshed = []
    model.lm_head.quant_method = SimpleNamespace(process_weights_after_loading=model.refreshed.append)
    return model


@pytest.mark.parametrize("images", [False, True])
def test_a_tied_head_is_packed_again_also_inside_a_model_with_images(images):
    text = text_model(tied=True)
    whole = text
    if images:
        whole = nn.Module()
        whole.language_model = text

    refresh_tied_head(whole)

    assert text.refreshed == [text.lm_head]


def test_a_head_of_its_own_weights_is_left():
    text = text_model(tied=False)
    refresh_tied_head(text)
    assert text.refreshed == []
