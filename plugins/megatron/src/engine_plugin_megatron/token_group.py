"""The ranks that share the tokens of each sequence (`cp`), a group of our own beside megatron-core's.

megatron-core is told nothing of them: to it they are copies of the model, whose gradients it sums and over which it spreads
the optimizer's state, as is right for ranks with different tokens. Its own way (each sequence cut in twice as many parts
as ranks, and attention of Transformer Engine) is not taken.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state

if TYPE_CHECKING:
    from engine_plugin_megatron.layout import MeshLayout

_GROUP: dict[str, Any] = {"tokens": None}  # of this process, as megatron-core's groups are


def make_token_group(mesh: MeshLayout) -> None:
    """Make the groups of a layout, neighbours among those that megatron-core takes for copies. Its own are there. Collective."""
    if mesh.cp == 1:
        return
    copies = mesh.dp * mesh.cp
    for stage in range(mesh.pp):
        for part in range(mesh.tp):
            ranks = [(stage * copies + copy) * mesh.tp + part for copy in range(copies)]
            if dist.get_rank() in ranks:
                assert ranks == dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
            for first in range(0, copies, mesh.cp):
                members = ranks[first : first + mesh.cp]
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    _GROUP["tokens"] = group


def token_group() -> Any:
    """This rank's group; None where each rank has whole sequences."""
    return _GROUP["tokens"]


def end_token_group() -> None:
    """End it; with its world it may have gone already."""
    if _GROUP["tokens"] is not None:
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(_GROUP["tokens"])
    _GROUP["tokens"] = None
