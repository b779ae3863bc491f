"""The conformance kit on the engine of the recurrent model."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine_plugin_custom_model.engine import GRULM
from engine_plugin_testing import TrainEngineSuite

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


def write(folder, model, seed, tied):
    """write_model: random weights and their sizes. The output matrix is the embedding, ``tied`` or not."""
    torch.manual_seed(seed)
    folder.mkdir()
    save_file(GRULM(*(model[key] for key in SIZES)).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({key: model[key] for key in SIZES}))


def load(path):
    """reference: the module of a folder, in float64."""
    sizes = json.loads((Path(path) / "config.json").read_text())
    module = GRULM(*(sizes[key] for key in SIZES))
    module.load_state_dict(load_file(Path(path) / "model.safetensors"))
    return module.double()


class TestGRU(TrainEngineSuite):
    backend = "gru"
    # gradients are read off a step of the weights, which must have one rate
    options = {"embedding_rate": 1.0}
    write_model = "test_conformance.py:write"
    reference = "test_conformance.py:load"
    unsupported = {"test_export_is_loaded_by_from_pretrained": "transformers does not have this model"}
