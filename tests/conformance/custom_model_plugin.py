"""A model that is not of transformers: embeddings, a running mean over the past, a head."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine_core import hookimpl


class RunningMean(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embed, self.mix = nn.Embedding(97, size), nn.Linear(size, size)
        self.head = nn.Linear(size, 97)

    def forward(self, input_ids, position_ids):
        seen = self.embed(input_ids).cumsum(1) / (position_ids[..., None] + 1)
        return self.head(torch.tanh(self.mix(seen)))


def write(folder, model, seed, tied):
    """What the engine and the reference both read; nothing is tied here."""
    size = 16 * model.get("num_hidden_layers", 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = RunningMean(size)
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"size": size}))


def load(path):
    from pathlib import Path

    module = RunningMean(json.loads((Path(path) / "config.json").read_text())["size"])
    module.load_state_dict(load_file(Path(path) / "model.safetensors"))
    return module.double()


@hookimpl
def engine_build_model(model_config):
    return load(model_config.path).float()
