"""A contract of random updates over links that come and go."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from engine_core.contracts.weight_transport import WeightUpdate
from engine_core.errors import TrainingFailed
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.transport_bench import TransportBench, same_weights
from engine_plugin_testing.transport_values import FLOATS, INTEGERS

SEED, LINKS, UPDATES = 1, 6, 5
TYPES = (*FLOATS, *INTEGERS, torch.uint8, torch.bool)
SIZES = (0, 1, 2, 3, 5, 8, 40)
LETTERS = ' ./ab\u00e9\U0001f600"\\\n\t\u0000'


def _weights(seed: int, device: torch.device) -> dict[str, Tensor]:
    """Return tensors [D_1, D_2, ...] of random names, types, shapes, strides and bits; pairs share their memory."""
    draws, made = random.Random(seed), torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for number in range(draws.choice((0, 1, 4, 12, 40))):
        dtype, shape = draws.choice(TYPES), draws.choices(SIZES, k=draws.randint(0, 4))
        bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=made)
        tensor = (bits % 2 if dtype is torch.bool else bits).view(dtype).view(shape).to(device)
        if tensor.ndim > 1 and draws.random() < 0.5:
            tensor = tensor.transpose(draws.randrange(tensor.ndim - 1), -1)
        name = "".join(draws.choices(LETTERS, k=draws.randint(0, 20)))
        found[f"{name}{number}{name}"] = tensor
        found[f"{number}"] = tensor[:1] if tensor.ndim else tensor
    return found


def _broken(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield half of the weights [D_1, D_2, ...], then raise an error."""
    yield from list(weights.items())[: len(weights) // 2]
    raise OSError("the stream broke off")


@contract(
    catches=(
        "spaces around a name lost",
        "a tensor of four dimensions in the order of its memory",
        "tensors that share their memory taken for one",
        "a repeated tensor taken from what the receiver keeps",
    )
)
def random_updates_arrive_bit_for_bit(bench: TransportBench) -> None:
    """Random updates, over links with random ends, arrive bit for bit at each receiver.

    Names, types, shapes, strides and bits are random. Ends come late, any rank may send, some updates are repeated, and
    each link ends with a stream that fails. Sender and receivers change their tensors after an update.

    Raises:
        AssertionError: a receiver got other weights; raised after the last link.
    """
    draws, delays = random.Random(SEED), random.Random(bench.rank)
    seeds, differences = [0], []
    for number in range(LINKS):
        members = draws.sample(bench.ranks, draws.randint(2, len(bench.ranks)))
        plan = [draws.choice((draws.getrandbits(30), seeds[-1])) for _ in range(UPDATES)]
        seeds += plan
        link = bench.link(f"random{number}", members)
        if link is None:
            continue
        for at, seed in enumerate(plan, 1):
            time.sleep(delays.choice((0.0, 0.0, 0.02)))
            weights = _weights(seed, bench.device)
            got = bench.whole(link, weights.items(), WeightUpdate(at, at + 3))
            received = got if link.endpoint.index else list(weights.items())
            try:
                same_weights(received, weights, f"of update {at} ({seed}) of link {number}, ranks {members}")
            except AssertionError as error:
                differences.append(error)
            for _, tensor in received:
                tensor.zero_()
        with contextlib.suppress(OSError, TrainingFailed):
            bench.update(link, _broken(bench.weights()), WeightUpdate(UPDATES + 1, 1))
        bench.exchange(f"failed{number}", True, members)
        link.close()
    if differences:
        raise differences[0]  # after the last link: its other ends have come to theirs
