"""The optimizer's step on this rank's parts of weights, without ``DTensor``.

An operator over lists of ``DTensor`` runs Python code for every tensor. For hundreds of weights this takes longer than
the arithmetic on their shards, and the device waits. Adam works element by element, so a step on the parts gives the
same result.
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
    """Make torch's Adam or AdamW update local parts; return whether ``optimizer`` is one of them.

    Parameters, groups and state stay ``DTensor``, so checkpoints, hooks and schedules see no difference. Other
    optimizers, including subclasses, do not change, because they may use whole matrices.
    """
    collect = getattr(type(optimizer), "_init_group", None)
    if type(optimizer) not in ELEMENTWISE or collect is None:
        return False
    owner = weakref.ref(optimizer)  # no cycle: the state is freed with the last reference to the optimizer
    optimizer._init_group = functools.partial(_collected_parts, collect, owner)
    return True


def _collected_parts(
    collect: Callable[..., Any], owner: weakref.ref[Any], group: Any, *lists: list[Any]
) -> Any:
    """Call ``Adam._init_group``, which fills lists of parameters, gradients, moments and steps; put local parts in."""
    answer = collect(owner(), group, *lists)
    for tensors in lists:
        tensors[:] = [here(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return answer
