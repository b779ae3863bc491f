"""A model that is not of transformers: embeddings, a running mean over the past, a head, and a saved buffer that shifts the logits."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine_core import hookimpl


class RunningMean(nn.Module):
    def __init__(self, size, vocab_size=97):
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocab_size, size), nn.Linear(size, size)
        self.head = nn.Linear(size, vocab_size)
        self.register_buffer("shift", torch.zeros(vocab_size))

    def forward(self, input_ids, position_ids):
        seen = self.embed(input_ids).cumsum(1) / (position_ids[..., None] + 1)
        return self.head(torch.tanh(self.mix(seen))) + self.shift


def write(folder, model, seed, tied):
    """What the engine and the reference both read; nothing is tied here."""
    size = 16 * model["num_hidden_layers"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = RunningMean(size, model["vocab_size"])
        nn.init.normal_(module.mix.weight, std=model["initializer_range"] * 5)
        nn.init.normal_(module.head.weight, std=model["initializer_range"] * 4)
        nn.init.normal_(module.shift, std=model["initializer_range"])
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    kept = {name: model[name] for name in ("vocab_size", "max_position_embeddings")}
    (folder / "config.json").write_text(json.dumps({"size": size, **kept}))


def write_small(folder, model, seed, tied):
    write(folder, {**model, "vocab_size": 64}, seed, tied)


def write_dull(folder, model, seed, tied):
    write(folder, {**model, "initializer_range": 0.0}, seed, tied)


def write_what_is_given(folder, model, seed, tied):
    folder.mkdir()
    (folder / "given.json").write_text(json.dumps(model))


def load(path):
    from pathlib import Path

    module = RunningMean(json.loads((Path(path) / "config.json").read_text())["size"])
    module.load_state_dict(load_file(Path(path) / "model.safetensors"))
    return module.double()


@hookimpl
def engine_build_model(model_config):
    return load(model_config.path).float()
