"""Activation checkpointing, and offloading of activations to host memory until the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from engine_plugin_torch.units import checkpoint_units

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
ATTENTION = ("attention", "attn")  # parts of the names of operators: flash, efficient, cudnn, varlen


def recompute(module: nn.Module, units: Sequence[str], how: str | int, wanted: Callable[[], bool]) -> None:
    """Make units recompute activations; call it before units are sharded. Parameter names stay the same.

    Args:
        module: the model; changed in place.
        units: names of the units.
        how: ``none``, ``full``, ``selective``, ``auto``, or n for every n-th unit.
        wanted: returns whether ``auto`` means ``full``; called in each forward pass.
    """
    if how == "selective":
        for name in units:
            _wrap_forward(module.get_submodule(name), _selectively)
    elif how == "auto":
        checkpoint_units(module, units, wanted)
    elif how != "none":
        checkpoint_units(module, units[::how] if isinstance(how, int) else units)


def share_recomputed(how: str | int, chosen: bool | None) -> float:
    """Return the share of the layers that keep only their input, for estimates of memory.

    Args:
        how: `activation_checkpointing`. ``selective`` counts as half: it keeps attention and every second product.
        chosen: the choice of ``auto``; None until it is made.
    """
    if isinstance(how, int):
        return 1 / how
    return {"none": 0.0, "full": 1.0, "selective": 0.5, "auto": float(bool(chosen))}[how]


def offload_activations(module: nn.Module, units: Sequence[str], pin: bool) -> None:
    """Keep the activations that units save for their backward pass in host memory, pinned if ``pin``."""

    def offloaded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass with its saved tensors in host memory."""
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return forward(*args, **kwargs)

    for name in units:
        _wrap_forward(module.get_submodule(name), offloaded)


def _selectively(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_Keep()),
        **kwargs,
    )


class _Keep:
    """A policy that keeps attention and every second matrix product; forward and recomputation count separately."""

    def __init__(self) -> None:
        self.products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if any(word in str(operator) for word in ATTENTION):
            return CheckpointPolicy.MUST_SAVE
        if operator in PRODUCTS:
            self.products[context.is_recompute] += 1
            if self.products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _wrap_forward(unit: nn.Module, around: Callable[..., Any]) -> None:
    unit.forward = functools.partial(around, unit.forward)
