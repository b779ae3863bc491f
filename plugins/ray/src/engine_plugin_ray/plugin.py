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
    """``[runtime.ray]``: every worker an actor of a Ray cluster, which a run starts for itself or joins."""

    address: str = ""
    """``HOST:PORT`` of a cluster's head, or ``auto`` for the one that this machine belongs to; empty: a private cluster on this machine."""
    cpus_per_process: float = Field(1.0, gt=0)
    """CPUs that a worker reserves in the cluster, in addition to its accelerator if it has one."""
    strategy: dict[str, Literal["pack", "spread", "strict_pack", "strict_spread"]] = {}
    """By pool of [placement]: place processes close together (``pack``, the default) or on different nodes (``spread``); ``strict_`` fails if that is impossible, the others only try."""
    env: dict[str, str] = {}
    """Environment variables of every worker."""
    python: dict[str, str] = {}
    """By pool: the Python that its processes run on, of an environment with the same versions of Python and Ray."""
    worker_transport: Literal["auto", "ray"] = "auto"
    """How commands and rollouts reach workers: ``auto``: those on the controller's node over a socket of the loopback interface, others by Ray; ``ray``: all by Ray."""
    object_store_mib: int = Field(512, ge=128)
    """Size of the object store of a cluster of the run's own."""

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
