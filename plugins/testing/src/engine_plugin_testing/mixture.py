"""Mixtures of experts with a weight for each expert, named as in a folder: the reference of engines.

transformers computes the experts of a layer from two fused tensors, and writes a tensor for each expert into a folder,
as engines name them. Here experts are computed one after another, as in the formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

FUSED = ("gate_up_proj", "down_proj")


class Expert(nn.Module):
    """An expert: ``down (act(gate x) * up x)``.

    Args:
        gate_up: [2 * wide, hidden]: gate, then up.
        down: [hidden, wide].
        act: activation of the gate.
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, gate_up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        for name, weight in zip(
            ("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True
        ):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            linear.weight.data.copy_(weight)
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, hidden] to [N, hidden]."""
        found: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return found


class Experts(nn.ModuleList):
    """A mixture: ``sum_k share[t, k] expert[index[t, k]](x[t])``, in the place of transformers' fused experts."""

    def forward(self, hidden: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        """Map [T, hidden], [T, K] and [T, K] to [T, hidden]."""
        found = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            tokens, place = (index == number).nonzero(as_tuple=True)
            found = found.index_add(0, tokens, shares[tokens, place, None] * expert(hidden[tokens]))
        return found


def split_experts(model: nn.Module) -> nn.Module:
    """Give each expert of a model its own weights, in place; models without experts stay as they are."""
    for name, module in list(model.named_modules()):
        if not all(getattr(getattr(module, part, None), "ndim", 0) == 3 for part in FUSED):
            continue
        gate_up, down = (getattr(module, part).detach() for part in FUSED)
        act = getattr(module, "act_fn", None)
        if act is None or gate_up.shape[1] != 2 * down.shape[2]:
            continue  # gate is not stacked above up: gpt-oss interleaves them, with biases
        model.set_submodule(name, Experts([Expert(*pair, act) for pair in zip(gate_up, down, strict=True)]))
    return model
