"""A language model that transformers does not have, and the engine that builds, trains and exports it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.optimizers import build_schedule


class GRULM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_hidden_layers):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, num_hidden_layers, batch_first=True)

    def step(self, input_ids, state=None):  # for the sampler, which keeps the state
        hidden, state = self.gru(self.embed(input_ids), state)
        return nn.functional.linear(hidden, self.embed.weight), state

    def forward(self, input_ids, position_ids=None):  # [1, T] each; logits [1, T, V]
        return self.step(input_ids)[0]


def build(model_path, override, seed):
    """The model of a folder and its sizes: its weights, or random ones that are the same in every process."""
    config, weights = Path(model_path) / "config.json", Path(model_path) / "model.safetensors"
    sizes = json.loads(config.read_text()) | override
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = GRULM(*(sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")))
    if weights.exists():
        module.load_state_dict(load_file(weights))
    return module, sizes


class GRUEngine(TorchEngine):
    def _build_model_optimizer(self, *, model_path, optim_config, override_model_config, role, **_):
        module, self.sizes = build(model_path, override_model_config, self.model_config.seed)
        if optim_config is None:  # a reference model is not trained: the engine continues alone
            return module
        module = self._place(module)  # on the device, in the type that is trained
        lr, decay = optim_config.lr, optim_config.weight_decay
        matrices = [p for p in module.gru.parameters() if p.ndim >= 2]
        biases = [p for p in module.gru.parameters() if p.ndim < 2]
        groups = [
            {"params": [module.embed.weight], "lr": lr * self.options.embedding_rate, "weight_decay": decay},
            {"params": matrices, "weight_decay": decay},
            {"params": biases, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=optim_config.betas, eps=optim_config.eps)
        return module, optimizer, build_schedule(optimizer, optim_config, self.context.total_steps, role)

    def export(self, folder, adapter=False):
        super().export(folder, adapter)
        (folder / "config.json").write_text(json.dumps(self.sizes))
