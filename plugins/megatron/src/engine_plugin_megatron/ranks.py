"""The ranks of one engine: megatron-core's groups over them, and small reductions over all.

megatron-core keeps its groups in global variables, so roles that share processes share a layout. The groups are reused
by the next engine of the same layout, since creating groups is slow.

The ranks that share the tokens of each sequence (`cp`) have a group that megatron-core does not know. It treats these
ranks as copies of the model: it sums their gradients and shards the optimizer state over them, which is right for ranks
with different tokens. megatron-core's own context parallelism is not used. It cuts each sequence into twice as many
parts as ranks and needs Transformer Engine's attention.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from engine_core.contracts.engines import Layout
from engine_core.errors import ConfigError
from engine_plugin_torch.rank_group import RankGroup
from engine_plugin_torch.state import random_state, set_random_state

if TYPE_CHECKING:
    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_megatron.layout import MeshLayout

_GROUPS: dict[str, Any] = {"layout": None, "users": []}  # of this process, with the roles that use them


class Ranks(RankGroup):
    """The group of all ranks, with this rank's place in the layout and its megatron-core groups.

    Args:
        mesh: the number of ranks along each axis.
        context: rank, number of ranks, role.
        device: this rank's device, with its index.

    Raises:
        ConfigError: another role in this process has another layout.
        EnvironmentProblem: there should be several ranks and no runtime has joined them.

    Attributes:
        layout: this rank's place among the ranks that receive data. The leader is the first rank of the first stage.
        tp: group of the ranks that share layers.
        pp: group of the stages.
        tokens: group of the ranks that share the tokens of each sequence; None without `cp`.
        last_stage: whether this rank has the head.
        counts: whether sums over all ranks include this rank's value: true for one rank of each copy of the model.
    """

    def __init__(self, mesh: MeshLayout, context: WorkerContext, device: torch.device) -> None:
        super().__init__(context.rank, context.world_size, device)
        self.mesh, self._role = mesh, context.role
        _divide(mesh, context.role)
        _GROUPS["users"].append(context.role)
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.pp = parallel_state.get_pipeline_model_parallel_group()
        self.tokens = token_group()
        copy, share = divmod(parallel_state.get_data_parallel_rank(), mesh.cp)
        first = self.tp.rank() == 0 and share == 0
        self.last_stage = self.pp.rank() == mesh.pp - 1
        self.counts = first and self.last_stage
        self.layout = Layout(copy, mesh.dp, is_leader=first and self.pp.rank() == 0)
        before = random_state(device)  # seeding megatron's generators sets torch's too
        tensor_parallel.model_parallel_cuda_manual_seed(context.seed + 1)
        set_random_state(before, device)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """Broadcast the last stage's tensor to all stages and return it on the CPU.

        Args:
            values: outputs [T] or [T, K]; the other stages give a tensor of the same shape and type.
        """
        if self.mesh.pp == 1:
            return values
        sent = values.to(self.device).contiguous()
        dist.broadcast(sent, dist.get_global_rank(self.pp, self.mesh.pp - 1), group=self.pp)
        return sent.cpu()

    def close(self) -> None:
        """Release the groups. Destroy them with a process group that was made for a single process."""
        if self._role in _GROUPS["users"]:
            _GROUPS["users"].remove(self._role)
            if self._own and not _GROUPS["users"]:
                _undo()
        super().close()


def _divide(mesh: MeshLayout, role: str) -> None:
    """Create megatron-core's groups, unless those of this layout exist already."""
    world = dist.group.WORLD
    if parallel_state.model_parallel_is_initialized():
        if _GROUPS["layout"] == (mesh, world):
            return
        if _GROUPS["users"]:
            other = _GROUPS["users"][0]
            raise ConfigError(
                f"[{role}.megatron] asks for {mesh}, and the role '{other}' in the same processes has "
                f"{_GROUPS['layout'][0]}: megatron-core has one layout a process. Give both roles the same tp, pp, "
                "virtual_pp, ep and cp."
            )
        _undo()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vp if mesh.vp > 1 else None,
        expert_model_parallel_size=mesh.ep,
        create_gloo_process_groups=False,  # only megatron's own checkpoints use them
    )
    make_token_group(mesh)
    _GROUPS["layout"] = (mesh, world)


def _undo() -> None:
    end_token_group()
    end_groups()
    _GROUPS["layout"] = None


def end_groups() -> None:
    """Destroy megatron-core's groups. megatron-core only drops its references, which leaves their threads running."""
    groups = getattr(parallel_state, "_global_process_group_list", None) or ()
    parallel_state.destroy_model_parallel()
    for group in groups:
        with contextlib.suppress(ValueError):  # destroyed with the world group
            if group is not None:
                dist.destroy_process_group(group)


_TOKENS: dict[str, Any] = {"tokens": None}  # one per process, like megatron-core's groups


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
                    _TOKENS["tokens"] = group


def token_group() -> Any:
    """Return this rank's group, or None where each rank has whole sequences."""
    return _TOKENS["tokens"]


def end_token_group() -> None:
    """Destroy this rank's group, unless it was destroyed with the world group."""
    if _TOKENS["tokens"] is not None:
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(_TOKENS["tokens"])
    _TOKENS["tokens"] = None
