"""One end of a link of ``broadcast``, for ``transport.py``: sends or takes a random model's weights, and times the parts.

    python benchmarks/async/transport_ends.py FOLDER SHAPE UPDATES PLACE

Place 0 sends from GPU 0, place 1 takes on GPU 1; on a CPU both are there. Each writes ``FOLDER/PLACE.json``.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core.contracts.weight_names import own_weights
from engine_core.contracts.weight_transport import TransportEndpoint, WeightUpdate
from engine_plugin_processes.transports.broadcast import Broadcast
from engine_plugin_processes.transports.bucketing import checksum, flat_buckets
from engine_plugin_processes.transports.table import BroadcastOptions
from engine_plugin_tools.bench.shapes import SHAPES
from engine_plugin_torch.weights import take_weights

WARM = 2
SECONDS = 60.0


def device_of(place: int) -> torch.device:
    """A GPU for each end, the only one where there is but one."""
    count = torch.cuda.device_count()
    found = torch.device("cuda", place % count) if count else torch.device("cpu")
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def now(device: torch.device) -> float:
    """Seconds, with everything done that was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def meet(folder: Path, place: int, device: torch.device) -> Broadcast:
    """This end, joined with the other."""
    endpoint = TransportEndpoint(
        transport="broadcast",
        index=place,
        names=("sender", "receiver"),
        device=device,
        host=socket.gethostname(),
        token="token",
        rendezvous={"file": str(folder / "meet"), "tcp": None},
        link_id="bench",
    )
    link = Broadcast(BroadcastOptions(timeout_seconds=SECONDS), endpoint)
    mine, theirs = folder / f"told{place}", folder / f"told{1 - place}"
    told: list[Any] = [None, None]
    told[place] = link.open()
    mine.with_suffix(".partial").write_text(json.dumps(told[place]))
    mine.with_suffix(".partial").rename(mine)
    end_at = time.monotonic() + SECONDS
    while not theirs.is_file():
        if time.monotonic() > end_at:
            raise SystemExit("The other end did not come.")
        time.sleep(0.05)
    told[1 - place] = json.loads(theirs.read_text())
    link.join(told)
    return link


def median_ms(work: Callable[[int], object], updates: int, device: torch.device) -> list[float]:
    """Milliseconds of each update after the first ones, and of the very first."""
    seconds = []
    for number in range(updates):
        start = now(device)
        work(number)
        seconds.append(now(device) - start)
    return [1000 * statistics.median(seconds[WARM:]), 1000 * seconds[0]]


def send(link: Broadcast, stream: Callable[[], Iterator[tuple[str, Tensor]]], updates: int) -> dict[str, Any]:
    """The sender's side; beside the updates what its parts take alone."""
    device = link.device
    found: dict[str, Any] = {}
    sent = sum(tensor.numel() * tensor.element_size() for _, tensor in stream())
    for mode, first in (("discard", 0), ("load", updates)):
        found[f"send_{mode}_ms"], _ = median_ms(
            lambda number, first=first: link.send(stream(), WeightUpdate(first + number + 1, number)),
            updates,
            device,
        )
    found["flatten_ms"], _ = median_ms(
        lambda _: sum(1 for _ in flat_buckets(stream(), device)), updates, device
    )
    flats = [flat.data.clone() for flat in flat_buckets(stream(), device)]
    found["checksum_ms"], _ = median_ms(lambda _: [checksum(data) for data in flats], updates, device)
    return found | {"bytes": sent, "buckets": len(flats), "nccl": link.bytes_group is not None}


def take(link: Broadcast, module: torch.nn.Module, updates: int) -> dict[str, Any]:
    """The receiver's side: weights thrown away, and loaded into a model."""
    device, found = link.device, {}

    def discard(number: int) -> None:
        for _ in link.receive(WeightUpdate(number + 1, number)):
            pass

    def load(number: int) -> None:
        take_weights(module, link.receive(WeightUpdate(updates + number + 1, number)))

    found["discard_ms"], found["first_ms"] = median_ms(discard, updates, device)
    found["update_ms"], _ = median_ms(load, updates, device)
    return found


def main() -> None:
    """Both modes, one after the other, in step with the other end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the ends meet and write")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("updates", type=int)
    parser.add_argument("place", type=int, choices=(0, 1), help="0 sends, 1 takes")
    given = parser.parse_args()
    folder, updates, place = given.folder, given.updates, given.place
    device = device_of(place)
    torch.manual_seed(place)
    with device:
        module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**SHAPES[given.shape]), dtype=torch.bfloat16
        )
    link = meet(folder, place, device)
    with torch.no_grad():
        if place == 0:
            found = send(link, lambda: iter(own_weights(module).items()), updates)
        else:
            found = take(link, module, updates)
            found["gb_per_s"] = sum(p.numel() * 2 for p in module.parameters()) / found["update_ms"] / 1e6
    (folder / f"{place}.json").write_text(json.dumps(found))
    link.close()


if __name__ == "__main__":
    main()
