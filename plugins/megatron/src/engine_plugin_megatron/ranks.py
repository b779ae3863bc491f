"""The ranks of one engine: megatron-core's groups over them, and small sums over all.

megatron-core keeps its groups in one place for the whole process. So roles that share processes share a layout; the
groups stay from one engine to the next of the same layout, since making them takes longer than using them.
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
from engine_plugin_megatron.token_group import end_token_group, make_token_group, token_group
from engine_plugin_torch.rank_group import RankGroup
from engine_plugin_torch.state import random_state, set_random_state

if TYPE_CHECKING:
    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_megatron.layout import MeshLayout

_GROUPS: dict[str, Any] = {"layout": None, "users": []}  # of this process: the roles that use them


class Ranks(RankGroup):
    """The place of this rank in a layout, and what all ranks agree on.

    Args:
        mesh: how many ranks share what; `dp` as the run has them.
        context: rank, number of ranks, role.
        device: of this rank, with its index.

    Raises:
        ConfigError: another role in this process has another layout.
        EnvironmentProblem: there should be several ranks and no runtime has joined them.

    Attributes:
        layout: place of this rank among those that get data. The leader is the first rank of the first stage.
        tp: group of the ranks that share layers.
        pp: group of the stages.
        tokens: group of the ranks that share the tokens of each sequence; None where there is no `cp`.
        last_stage: whether this rank has the head.
        counts: whether sums over all ranks take this rank's value: one rank of each copy of the model does.
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
        """What the last stage has, on every stage; the others give a tensor of its shape and type. On the CPU."""
        if self.mesh.pp == 1:
            return values
        sent = values.to(self.device).contiguous()
        dist.broadcast(sent, dist.get_global_rank(self.pp, self.mesh.pp - 1), group=self.pp)
        return sent.cpu()

    def communicators(self) -> dict[str, dist.ProcessGroup]:
        """Groups of several ranks, by axis."""
        axes = {
            "tp": self.tp,
            "pp": self.pp,
            **({} if self.tokens is None else {"cp": self.tokens}),
            "dp": parallel_state.get_data_parallel_group(),
            "ep": parallel_state.get_expert_model_parallel_group(),
        }
        return {name: group for name, group in axes.items() if group.size() > 1}

    def close(self) -> None:
        """Give the groups up; with a process group that was made for one process they go, too."""
        if self._role in _GROUPS["users"]:
            _GROUPS["users"].remove(self._role)
            if self._own and not _GROUPS["users"]:
                _undo()
        super().close()


def _divide(mesh: MeshLayout, role: str) -> None:
    """Make megatron-core's groups, where those of this layout are not there yet."""
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
        create_gloo_process_groups=False,  # for megatron's own checkpoints
    )
    make_token_group(mesh)
    _GROUPS["layout"] = (mesh, world)


def _undo() -> None:
    end_token_group()
    end_groups()
    _GROUPS["layout"] = None


def end_groups() -> None:
    """End megatron-core's groups. It only forgets them: their threads would go on, hundreds after some layouts."""
    groups = getattr(parallel_state, "_global_process_group_list", None) or ()
    parallel_state.destroy_model_parallel()
    for group in groups:
        with contextlib.suppress(ValueError):  # it went with its world
            if group is not None:
                dist.destroy_process_group(group)
