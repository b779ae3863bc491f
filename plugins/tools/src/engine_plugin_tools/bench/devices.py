"""Rates of devices by their data sheets, and the floors that follow: times that no program can beat.

* training: the model's arithmetic at the dense bf16 rate, and Adam's update at the rate of the memory (reads weight,
  gradient and two moments, writes three of them: 28 bytes a weight in float32);
* sampling: each step reads the weights once and the keys and values of every sequence so far. The sum over the steps,
  at the rate of the memory. Arithmetic is not counted: it costs less up to hundreds of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_plugin_tools.bench.shapes import Cost

ADAM_TRAFFIC = 7  # numbers a weight: four read, three written


@dataclass(frozen=True)
class Device:
    """The rates of a device.

    Attributes:
        flops: dense bf16 operations a second.
        bandwidth: bytes a second of its memory.
    """

    flops: float
    bandwidth: float


DEVICES: dict[str, Device] = {
    "B200": Device(2250e12, 8.0e12),
    "H200": Device(989e12, 4.8e12),
    "H800": Device(989e12, 3.35e12),
    "H100 PCIe": Device(756e12, 2.0e12),
    "H100 NVL": Device(835e12, 3.9e12),
    "H100": Device(989e12, 3.35e12),
    "A100-PCIE-40GB": Device(312e12, 1.555e12),
    "A100-SXM4-40GB": Device(312e12, 1.555e12),
    "A100 80GB PCIe": Device(312e12, 1.935e12),
    "A100": Device(312e12, 2.039e12),
    "L40S": Device(362e12, 0.864e12),
}
"""Rates from the vendors' data sheets, by words in the device's name, the longer words first."""


def device_of(name: str) -> Device | None:
    """Return the rates of a device by its name; None for a device without an entry, for which no floor is known."""
    return next((device for word, device in DEVICES.items() if word in name), None)


def train_floor(
    cost: Cost, device: Device, lengths: Sequence[int], head_tokens: int, itemsize: int = 4, ranks: int = 1
) -> float:
    """Return the least seconds of a forward and backward pass over these sequences and an update of all weights.

    Args:
        cost: the model's cost per token.
        device: rates of each device.
        lengths: tokens of each sequence.
        head_tokens: tokens for which the head is computed.
        itemsize: bytes of a weight.
        ranks: devices that share the work evenly.
    """
    arithmetic = cost.train(list(lengths), head_tokens) / device.flops
    update = ADAM_TRAFFIC * itemsize * cost.weights / device.bandwidth
    return (arithmetic + update) / ranks


def decode_floor(
    cost: Cost,
    device: Device,
    sequences: float,
    prompt: float,
    response: float,
    ranks: int = 1,
    itemsize: int = 2,
) -> float:
    """Return the least seconds to sample ``response`` tokens for each of ``sequences`` prompts at the same time.

    ``sum over t < R of (W + B k (prompt + t)) / bandwidth``: W bytes of the weights, k of a token's keys and values.

    Args:
        cost: the model's cost per token.
        device: rates of each device.
        sequences: B, over all devices, each of which has the whole model.
        prompt: tokens before the first sampled one.
        response: R, tokens sampled.
        ranks: devices.
        itemsize: bytes of a weight, a key, a value.
    """
    read = (cost.body + cost.head) * itemsize * response  # only a few rows of the embedding are read
    # tokens read by one sequence, over all its steps
    seen = response * prompt + response * (response - 1) / 2
    return (read + sequences / ranks * cost.keys_values * itemsize * seen) / device.bandwidth
