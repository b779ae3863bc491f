"""A language model that transformers does not have: blocks of a causal convolution and a gated layer."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

WIDTH = 4  # tokens that a convolution sees


class Block(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.conv = nn.Conv1d(hidden_size, hidden_size, WIDTH, groups=hidden_size)
        self.gate = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden):  # [1, T, H]
        seen = self.conv(F.pad(self.norm(hidden).transpose(1, 2), (WIDTH - 1, 0))).transpose(1, 2)
        value, gate = self.gate(seen).chunk(2, dim=-1)
        return hidden + self.out(value * F.silu(gate))


class ConvLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_hidden_layers):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size) for _ in range(num_hidden_layers))
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None):  # [1, T] each; logits [1, T, V]
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build(model_path, override, seed):
    """The model of a folder: its sizes, and its weights or random ones, the same in every process."""
    sizes = json.loads((Path(model_path) / "config.json").read_text()) | override
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = ConvLM(*(sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")))
    if (weights := Path(model_path) / "model.safetensors").exists():
        module.load_state_dict(load_file(weights))
    return module
