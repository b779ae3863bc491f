"""The optimizer's step over the parts of weights that lie here, without a ``DTensor`` in between.

An operator over lists of ``DTensor`` goes through Python for every tensor, which for hundreds of weights takes longer than the
arithmetic on a shard of them, while the device waits. Adam's arithmetic is element by element, so that of the parts is that of
the whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from engine_plugin_torch.sharded import here

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW)


def step_on_parts(optimizer: Any) -> bool:
    """Have an optimizer of torch that works element by element update local parts; returns whether it does now.

    Parameters, groups and state stay ``DTensor``, so checkpoints, hooks and schedules see no difference. Others,
    a subclass too, are left as they are: they may look at whole matrices.
    """
    collect = getattr(type(optimizer), "_init_group", None)
    if type(optimizer) not in ELEMENTWISE or collect is None:
        return False
    owner = weakref.ref(optimizer)  # no cycle: its state is freed with the last one who holds it
    optimizer._init_group = functools.partial(_collected_parts, collect, owner)
    return True


def _collected_parts(
    collect: Callable[..., Any], owner: weakref.ref[Any], group: Any, *lists: list[Any]
) -> Any:
    """``Adam._init_group``: fills lists of parameters, gradients, moments and steps; then has parts in them."""
    answer = collect(owner(), group, *lists)
    for tensors in lists:
        tensors[:] = [here(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return answer
