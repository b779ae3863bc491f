"""The speed of communication between the ranks of an engine: seconds of each collective, on the groups of a run.

Two bandwidths are computed, as in nccl-tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
With S bytes, t seconds and n ranks the algorithm bandwidth is ``S / t``. The bus bandwidth is that of the busiest link
and can be compared with the hardware's bandwidth for any n:

| collective | S | bus bandwidth |
|---|---|---|
| all_reduce | what each rank has | ``2 (n - 1) / n * S / t`` |
| all_gather | what each rank has afterwards | ``(n - 1) / n * S / t`` |
| reduce_scatter | what each rank had before | ``(n - 1) / n * S / t`` |
| all_to_all | what each rank has | ``(n - 1) / n * S / t`` |
| broadcast | what the first rank has | ``S / t`` |
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WARMUP = 2


def bus_factor(name: str, ranks: int) -> float:
    """Return the bus bandwidth divided by the algorithm bandwidth."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(name, share)


def measure(
    groups: Mapping[str, dist.ProcessGroup], device: torch.device, sizes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Measure each collective over each group at each size. Collective: all ranks measure, the slowest counts.

    Args:
        groups: process groups by the name of the mesh's axis.
        device: the device of the tensors.
        sizes: S in bytes, rounded up so that ranks have equal parts.
        repeats: number of timed calls; the median counts.

    Returns:
        One record per axis, size and collective.
    """
    found = []
    for axis, group in groups.items():
        ranks = group.size()
        near = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) == dist.get_world_size()
        for size in sizes:
            count = -(-size // (4 * ranks)) * ranks  # float32
            for name, run in _collectives(group, device, count).items():
                seconds = _seconds(run, group, device, repeats)
                speed = 4 * count / seconds
                found.append(
                    {
                        "axis": axis,
                        "ranks": ranks,
                        "backend": _backend(group, device),
                        "on_one_host": near,
                        "collective": name,
                        "bytes": 4 * count,
                        "seconds": seconds,
                        "algorithm_gb_per_s": speed / 1e9,
                        "bus_gb_per_s": bus_factor(name, ranks) * speed / 1e9,
                    }
                )
    return found


def _collectives(group: dist.ProcessGroup, device: torch.device, count: int) -> dict[str, Callable[[], Any]]:
    """Return a function for each collective, on tensors of ``count`` numbers; the ranks divide ``count`` evenly."""
    whole, other = torch.ones(count, device=device), torch.ones(count, device=device)
    part = torch.ones(count // group.size(), device=device)
    first = dist.get_global_rank(group, 0)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
    }


def _seconds(run: Callable[[], Any], group: dist.ProcessGroup, device: torch.device, repeats: int) -> float:
    """Return the median seconds of the slowest rank."""
    taken = []
    for number in range(WARMUP + repeats):
        dist.barrier(group)
        _settle(device)
        start = time.perf_counter()
        run()
        _settle(device)
        if number >= WARMUP:
            taken.append(time.perf_counter() - start)
    slowest: Tensor = torch.tensor(statistics.median(taken), device=device, dtype=torch.float32)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that sends tensors of a device in this group."""
    backends = str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl"
    return dict(pair.split(":") for pair in backends.split(",")).get(device.type, backends)


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
