"""The devices of a plan: their memory, and the operations and bytes a second of their data sheets."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import psutil

from engine_core.errors import ConfigError, did_you_mean
from engine_plugin_tools.bench.shapes import BANDWIDTH, DENSE_BF16_FLOPS

GIB = 2**30
DEVICES = {
    "a100-40": 39.4, "a100": 79.2, "h100": 79.2, "h200": 139.8, "b200": 178.4, "l40s": 44.4, "rtx4090": 23.5,
}  # fmt: skip
"""GiB that the driver reports, by device."""


@dataclass(frozen=True)
class Limits:
    """A device's dense bf16 operations and bytes of memory a second."""

    name: str
    flops: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.name}: {self.flops / 1e12:,.3g} TFLOP/s in bf16, {self.bandwidth / 1e12:.3g} TB/s"

    @classmethod
    def of(cls, name: str) -> Limits | None:
        """Return the limits of a device by a name that contains that of its data sheet; None for another one."""
        if name == CPU.name:
            return CPU
        plain = name.lower().replace(" ", "")
        words = (word for word in DENSE_BF16_FLOPS if word.lower().replace(" ", "") in plain)
        return next((cls(word, DENSE_BF16_FLOPS[word], BANDWIDTH[word]) for word in words), None)


CPU = Limits("cpu", 0.1e12, 20e9)
"""Some processor: without calibration its seconds say little."""


@dataclass(frozen=True)
class Device:
    """Devices of the same kind.

    Attributes:
        name: of the kind; empty: unknown.
        memory: bytes of one of them.
        count: number of them.
    """

    name: str
    memory: int
    count: int = 1

    @property
    def limits(self) -> Limits | None:
        """The rates of the device; None: unknown."""
        return Limits.of(self.name) if self.name else None


def find_devices(devices: str | None, memory: float | None) -> Device:
    """Return the devices that options name, or those of this machine.

    Args:
        devices: a name of ``DEVICES`` or ``cpu``, perhaps with a number: ``h200x2``.
        memory: GiB of one of them, for a device without a name or with less memory.

    Raises:
        ConfigError: a name is unknown, or this machine has no device and none is named.
    """
    known = {name: int(size * GIB) for name, size in DEVICES.items()}
    known |= {CPU.name: int(psutil.virtual_memory().total)}
    name, count = (devices or "").lower(), 1
    first, _, last = name.rpartition("x")
    if name not in known and last.isdigit():
        name, count = first, max(1, int(last))
    if name and name not in known:
        raise ConfigError(
            f"--devices '{devices}' is not known.{did_you_mean(name, known)} N devices: h200xN; any other "
            "device: --memory GIB."
        )
    if memory is not None:
        return Device(name, int(memory * GIB), count)
    if name:
        return Device(name, known[name], count)
    if not (found := installed_devices()):
        raise ConfigError(
            "This machine reports no GPU. Name the devices (--devices h200x2, or cpu) or their --memory GIB."
        )
    return Device(found[0].name, min(each.memory for each in found), count if devices else len(found))


def installed_devices() -> list[Device]:
    """Return each GPU of this machine; asked of the driver's tool, which starts no CUDA context."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    words = [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    lines = [line.partition(",") for line in done.stdout.splitlines()]
    return [Device(name.strip(), int(size) * 2**20) for size, _, name in lines if size.strip().isdigit()]
