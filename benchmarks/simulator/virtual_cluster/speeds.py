"""Times of simulated workers, from a few measured rates, and lengths of responses.

``benchmarks/simulator/README.md`` says where and how the rates of ``SPEEDS`` were measured. All other times follow from them:

- A sampler with b responses in flight takes ``token_seconds + b * token_seconds_each`` for one token of each: a line
  through the rate of one response alone and the rate of a full batch.
- Prompts of requests that are new to a sampler first go through the model at ``prefill_rate``, one after another, the
  prompt of a group once.
- A trainer's rank processes its tokens at ``train_rate``; without gradient at three times that, since a backward pass
  costs two forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from engine_core.errors import ConfigError

WAYS = ("relay", "star")
"""Ways of an update of weights to samplers on separate devices."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one model on one kind of device. Rates are tokens a second and device, times seconds."""

    name: str
    about: str
    token_seconds: float  # of one decoding step, whatever the batch
    token_seconds_each: float  # of it, for each response in flight
    prefill_rate: float
    train_rate: float
    optimizer_seconds: float
    weight_bytes: int  # of a sampler's copy
    load_seconds: float  # to load them into a sampler
    weight_bandwidth: float = 50e9  # bytes/s of a device's network: 400 Gb/s
    controller_bandwidth: float = 12.5e9  # bytes/s of the controller's: 100 Gb/s
    message_seconds: float = 2e-4  # of a message between controller and worker, one way
    call_tokens: int = 8  # most tokens of each response in one ``advance``
    capacity: int = 256  # responses in flight on a sampler
    reward_seconds: float = 2e-3  # of one sample, on one worker of the rewards

    @classmethod
    def of_rates(
        cls, name: str, about: str, alone: float, batch: int, together: float, **others: float
    ) -> Speeds:
        """Return speeds that follow from two rates of sampling.

        Args:
            name: the model's name.
            about: source of the rates.
            alone: tokens/s of one response.
            batch: responses of the other rate.
            together: tokens/s of all of them.
            others: further fields.
        """
        each = (batch / together - 1 / alone) / (batch - 1)
        return cls(name, about, 1 / alone - each, each, **others)  # type: ignore[arg-type]

    def decode_step(self, batch: int) -> float:
        """Return the seconds of one token for each of ``batch`` responses."""
        return self.token_seconds + batch * self.token_seconds_each

    def weights_seconds(self, samplers: int, way: str) -> float:
        """Return the seconds of an update of all samplers.

        Args:
            samplers: number of receivers.
            way: ``star``: one trainer's rank sends to each sampler, as the transport ``tcp`` does; ``relay``: each
                sampler forwards what it has while more arrives, so that the bytes pass each link once.
        """
        once = self.weight_bytes / self.weight_bandwidth
        if way == "star":
            return once * samplers + self.load_seconds
        hops = math.ceil(math.log2(samplers + 1))
        return once + hops * self.message_seconds + self.load_seconds


SPEEDS: Mapping[str, Speeds] = {
    found.name: found
    for found in (
        Speeds.of_rates(
            "qwen3-0.6b",
            "An H200. Sampling: 40,400 tokens/s with 512 responses, 414 with one. Training: 119,400 tokens/s.",
            *(414, 512, 40_400),
            prefill_rate=3 * 119_400,  # the forward pass alone
            train_rate=119_400,
            optimizer_seconds=0.0035,
            weight_bytes=1_190_000_000,
            load_seconds=0.034,
        ),
        Speeds.of_rates(
            "qwen3-8b",
            "An H200. Sampling: 12,500 tokens/s with 256 responses (an H100, of others), 205 with one (by its memory's rate). "
            "Training: 8,700 tokens/s.",
            *(205, 256, 12_500),
            prefill_rate=3 * 8_700,
            train_rate=8_700,
            optimizer_seconds=0.047,
            weight_bytes=16_400_000_000,
            load_seconds=0.47,  # of the small one, by bytes
        ),
    )
}
"""Speeds by name of the model."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of the tokens of responses: lognormal, cut at ``most``.

    The logarithm has the mean ``log(median)`` and the deviation ``log(p99 / median) / 2.326``.
    """

    median: float = 300.0
    p99: float = 4096.0
    most: int = 8192

    def __post_init__(self) -> None:
        if not 1 <= self.median <= self.p99 or self.most < 1:
            raise ConfigError(
                f"The lengths of responses: got a median of {self.median:g}, a 99th percentile of {self.p99:g} and at most "
                f"{self.most} tokens. Expected 1 <= median <= p99, and at least 1 token."
            )

    @property
    def sigma(self) -> float:
        """The deviation of the logarithm."""
        return math.log(self.p99 / self.median) / NormalDist().inv_cdf(0.99)

    def of(self, seed: int) -> int:
        """Return the length of the response with this seed of 63 bits, which no sampler and no time changes."""
        if self.sigma == 0:
            return min(round(self.median), self.most)
        share = (seed + 0.5) / (1 << 63)
        drawn = math.exp(math.log(self.median) + self.sigma * NormalDist().inv_cdf(share))
        return max(1, min(round(drawn), self.most))
