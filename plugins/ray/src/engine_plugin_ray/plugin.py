"""The hook of this distribution. Imports neither torch nor Ray: ``engine validate`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from engine_core import hookimpl
from engine_core.specs import RuntimeSpec
from engine_plugin_processes.options import ProcessOptions
from engine_plugin_ray.address import AUTO, host_and_port


class RayOptions(ProcessOptions):
    """``[runtime.ray]``: every worker is an actor of a Ray cluster. The run starts a private cluster or joins an existing cluster."""

    address: str = ""
    """``HOST:PORT`` of the head of a Ray cluster. ``auto``: the cluster to which this machine belongs. Empty: a private cluster on this machine."""
    cpus_per_process: float = Field(1.0, gt=0)
    """Number of CPUs that each worker reserves in the cluster, in addition to its accelerator if it has one."""
    strategy: dict[str, Literal["pack", "spread", "strict_pack", "strict_spread"]] = {}
    """Placement of each pool of ``[placement]``, by pool name. ``pack`` (default): place the processes close together. ``spread``: place the processes on different nodes. With the prefix ``strict_`` the run fails if the placement is impossible; without it, Ray only tries."""
    env: dict[str, str] = {}
    """Environment variables of every worker."""

    @field_validator("address")
    @classmethod
    def _an_address(cls, address: str) -> str:
        if address not in ("", AUTO):
            host_and_port(address)
        return address


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """Offer ``ray``."""
    spec = RuntimeSpec(
        load="engine_plugin_ray.runtime:RayRuntime",
        config=RayOptions,
        check="engine_plugin_ray.placing:problems",
    )
    return {"ray": spec}
