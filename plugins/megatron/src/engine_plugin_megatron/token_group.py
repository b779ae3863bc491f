"""The group of ranks that share the tokens of each sequence (`cp`), separate from megatron-core's groups.

megatron-core treats these ranks as copies of the model: it sums their gradients and shards the optimizer state over
them, which is right for ranks with different tokens. megatron-core's own context parallelism is not used. It cuts each
sequence into twice as many parts as ranks and needs Transformer Engine's attention.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state

if TYPE_CHECKING:
    from engine_plugin_megatron.layout import MeshLayout

_GROUP: dict[str, Any] = {"tokens": None}  # one per process, like megatron-core's groups


def make_token_group(mesh: MeshLayout) -> None:
    """Create a layout's groups: neighbors in megatron-core's data-parallel groups, which must exist. Collective."""
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
    """Return this rank's group, or None where each rank has whole sequences."""
    return _GROUP["tokens"]


def end_token_group() -> None:
    """Destroy this rank's group, unless it was destroyed with the world group."""
    if _GROUP["tokens"] is not None:
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(_GROUP["tokens"])
    _GROUP["tokens"] = None
