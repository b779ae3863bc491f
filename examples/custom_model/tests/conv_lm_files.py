"""What the kit asks of a model of one's own: how its folder is written, and the module to compare with."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine_plugin_custom_model.conv_lm import ConvLM, build

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


def write(folder, model, seed, tied):
    """write_model: random weights and their sizes."""
    torch.manual_seed(seed)
    folder.mkdir()
    save_file(ConvLM(*(model[key] for key in SIZES)).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({key: model[key] for key in SIZES}))


def load(path):
    """reference: the module of a folder, in float64."""
    return build(Path(path), {}, 0).double()
