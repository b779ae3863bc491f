"""Keys of weights that are not trained: `quantize` and `device_map`, and the roles that cannot have them."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig


def frozen_role_problems(config: EngineConfig, reads: Collection[str]) -> Iterator[str]:
    """Roles whose tables ask of their weights what only frozen ones can have.

    Args:
        reads: sections that the run's trainer reads.
    """
    follows = "algorithm" in reads and config.algorithm.ref_refresh_steps > 0
    for role in (role for role in ("actor", "critic", "ref", "teacher") if role in reads):
        holder = getattr(config, role)
        if holder is None:
            continue
        table, adapted = f"{role}.{holder.backend}", holder.lora is not None
        untrained = role in ("ref", "teacher")
        method = getattr(holder.options, "quantize", None)
        if method and (problem := quantize_problem(method, table, untrained or adapted)):
            yield problem
        frozen = untrained and not (role == "ref" and follows)
        if getattr(holder.options, "device_map", None) and (
            problem := device_map_problem(table, frozen, adapted)
        ):
            yield problem


def quantize_problem(method: str, table: str, frozen: bool) -> str | None:
    """What to say to a role whose weights cannot be kept in few bits, as far as it is seen without torch.

    Args:
        method: `quantize` of the backend's table.
        table: where it stands: ``actor.torch``.
        frozen: the weights are not trained: no role's, or those below an adapter.
    """
    role = table.partition(".")[0]
    if not frozen:
        return (
            f"{table}.quantize: '{method}' is for weights that are not trained, and this role's are. Leave the key out, "
            f"or train an adapter above them: [{role}.lora]."
        )
    if method in ("nf4", "fp4") and importlib.util.find_spec("bitsandbytes") is None:
        return (
            f"{table}.quantize: '{method}' needs the package bitsandbytes, which is not installed. Try: "
            "pip install 'engine-plugin-torch[quant]', or use 'int8' or 'fp8', which need no package."
        )
    return None


def device_map_problem(table: str, frozen: bool, lora: bool) -> str | None:
    """What to say to a role whose layers cannot be spread over devices, as far as it is seen without torch.

    Args:
        table: where `device_map` stands: ``ref.torch``.
        frozen: its weights never change.
        lora: it has an adapter.
    """
    role = table.rpartition(".")[0]
    if not frozen:
        return (
            f"{table}.device_map: it is for weights that never change, and those of '{role}' do. Leave the key out; a model "
            f"that is trained is spread by a train engine that shards: {role}.backend (`engine plugins` lists them)."
        )
    if lora:
        return (
            f"{table}.device_map: the role has an adapter ([{role}.lora]), which lies beside its layers. Export the adapter "
            f"merged (`engine export`) and name that folder in {role}.path, or leave the key out."
        )
    if importlib.util.find_spec("accelerate") is None:
        return (
            f"{table}.device_map needs the package accelerate, which is not installed. Try: "
            "pip install 'engine-plugin-torch[device-map]', or leave the key out."
        )
    return None
