"""The module of the model, and how it is built from a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


class Block(nn.Module):
    """A layer that adds to each token what it makes of the token and of the mean of those before it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.up = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [1, T, H] for ``hidden`` [1, T, H]."""
        each = self.norm(hidden)
        counts = torch.arange(1, each.shape[1] + 1, device=each.device, dtype=each.dtype)[:, None]
        seen = torch.cat((each, each.cumsum(1) / counts), dim=-1)
        return hidden + self.down(nn.functional.silu(self.up(seen)))


class TemplateName(nn.Module):
    """A causal language model, or with ``values`` a critic: no position may see later ones."""

    def __init__(
        self, vocab_size: int, hidden_size: int, num_hidden_layers: int, values: bool = False
    ) -> None:
        super().__init__()
        self.values = values
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size) for _ in range(num_hidden_layers))
        self.head = nn.Linear(hidden_size, 1 if values else vocab_size, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits [1, T, V] of one sequence ``input_ids`` [1, T]; a critic's values [1, T], each of the tokens up to it."""
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)[..., 0] if self.values else self.head(hidden)


def build(folder: str | Path, override: Mapping[str, Any], seed: int, values: bool = False) -> TemplateName:
    """Build the model of a folder from ``config.json``, with its weights or with random ones, equal in every process."""
    sizes = json.loads((Path(folder) / "config.json").read_text()) | override
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = TemplateName(*(sizes[key] for key in SIZES), values=values)
    file = Path(folder) / "model.safetensors"
    if file.exists():
        weights = load_file(file)
        own = module.state_dict()
        if values and weights["head.weight"].shape != own["head.weight"].shape:
            weights["head.weight"] = own[
                "head.weight"
            ]  # a critic that starts from a language model: a new head
        module.load_state_dict(weights)
    return module
