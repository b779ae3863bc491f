"""Contracts of the values that cross a link, of many updates, and of what a closed link leaves behind."""

from __future__ import annotations

import gc
import time
from typing import Any

import psutil
import torch
from torch import Tensor

from engine_core.contracts.weight_transport import WeightUpdate
from engine_core.errors import TrainingFailed
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.transport_bench import BUCKET_BYTES, TransportBench, same_weights

UPDATES = 20
PATIENCE = 4.0  # seconds within which threads and descriptors of a closed link must be gone
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _of_every_kind(bench: TransportBench) -> dict[str, Tensor]:
    """Return tensors [D_1, D_2, ...] of every type with its extreme values, and of sizes from none to 400 KB."""
    found: dict[str, Tensor] = {}
    for dtype in FLOATS:
        about = torch.finfo(dtype)
        values = [
            about.max,
            about.min,
            about.tiny,
            about.tiny / 4,
            -0.0,
            torch.inf,
            -torch.inf,
            torch.nan,
            -1 / 3,
        ]
        found[f"float.{dtype}"] = torch.tensor(values, dtype=torch.float64).to(dtype)
    odd = torch.tensor([0x7FC01234, -0x3FEDCC, 0x7F800001], dtype=torch.int32)  # NaN of other bits
    found["float.nan"] = odd.view(torch.float32)
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        found[f"int.{dtype}"] = torch.tensor([limits.min, limits.max, -1, 0, 1], dtype=dtype)
    found["bool"] = torch.arange(37) % 3 == 0
    made = torch.Generator().manual_seed(5)
    for size in (0, 1, BUCKET_BYTES // 4 - 1, BUCKET_BYTES // 4, BUCKET_BYTES // 4 + 1, 30_001, 100_003):
        found[f"sizes.{size}"] = torch.randn(size, generator=made)
    found["sizes.wide"] = torch.randn(3, 20_000, generator=made)[:, ::2].to(torch.float64)
    found["shapes.five"] = torch.zeros(2, 1, 3, 0, 5)
    found["shapes.expanded"] = torch.randn(7, 1, generator=made).expand(7, 40)
    found["shapes.parameter"] = torch.nn.Parameter(torch.randn(5, 3, generator=made))
    found |= {f"many.{number}": torch.tensor([-number]) for number in range(300)}
    found["layers." + "very.long." * 60 + "\u00e9"] = torch.tensor(-2.5)
    return {name: tensor.to(bench.device) for name, tensor in found.items()}


@contract(
    catches=(
        "NaN replaced by 0",
        "float64 rounded to float32",
        "negative integers lost",
        "large tensors cut",
        "an empty update refused",
        "every update after the sixteenth stale",
        "empty tensors left out",
    )
)
def values_of_every_kind_cross_exactly(bench: TransportBench) -> None:
    """Tensors of any type and with any values arrive bit for bit.

    Values include infinities, NaN and the least and largest ones. An update has up to 100 buckets, or none. Twenty
    updates in a row, of different tensors, are each the sender's.

    Raises:
        AssertionError: the transport refuses an update, or what arrives differs.
    """
    link, every = bench.link(), _of_every_kind(bench)
    assert link is not None
    empty = {
        "a": torch.zeros(0, device=bench.device),
        "b": torch.zeros(3, 0, dtype=torch.int8, device=bench.device),
    }
    names = sorted(every)
    updates = [every, {}, empty, dict(reversed(every.items()))]
    for number in range(len(updates), UPDATES):
        updates.append({**bench.weights(number), **{name: every[name] for name in names[number::UPDATES]}})
    received: list[Any] = []
    for number, weights in enumerate(updates, 1):
        try:
            received.append(bench.whole(link, weights.items(), WeightUpdate(number, number + 5)))
        except TrainingFailed as error:
            raise AssertionError(f"Update {number} of {len(weights)} tensors failed: {error}") from error
    for number, (got, weights) in enumerate(zip(received, updates, strict=True), 1):
        if link.endpoint.index:
            same_weights(got, weights, f"of update {number} of {UPDATES}")
        else:
            expected = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
            assert got == expected, f"send of update {number} returned {got}; expected {expected} bytes."


@contract(catches=("a thread left by every link", "a socket left by every link", "a file left by every link"))
def nothing_is_left_once_it_is_closed(bench: TransportBench) -> None:
    """After ``close``, no thread, no open file and no file of the transport is left.

    ``close`` is called twice on all ends. Links are opened, used and closed one after another.
    """
    after_one = (0, 0)
    for label in ("link", "second", "third"):
        link = bench.link(label)
        assert link is not None
        for number in (1, 2):
            bench.whole(link, bench.weights().items(), WeightUpdate(number, number))
        bench.all_here(f"updated-{label}")
        link.close()
        link.close()
        bench.all_here(f"closed-{label}")
        after_one = after_one if any(after_one) else _held()
    end = time.monotonic() + PATIENCE
    while any(now > before + 1 for now, before in zip(_held(), after_one, strict=True)):  # two links more
        assert time.monotonic() < end, (
            f"After three links that were closed this process has {_held()} open files and threads; after the first it had "
            f"{after_one}."
        )
        time.sleep(0.05)
    left = sorted(path.name for path in bench.folder.rglob("private-*/**/*"))
    assert not left, f"After close there is left in the temporary folder: {left}."


def _held() -> tuple[int, int]:
    """Return the numbers of open files and of threads of this process."""
    gc.collect()
    own = psutil.Process()
    return own.num_fds(), own.num_threads()
