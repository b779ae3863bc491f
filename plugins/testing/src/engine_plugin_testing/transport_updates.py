"""Contracts of updates that succeed: every weight reaches every receiver once, in order, and stays unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.config.roles import LoRAConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.contracts.weight_sync import ADAPTER_CONFIG, ADAPTER_PREFIX, stream_of
from engine_core.contracts.weight_transport import WeightUpdate
from engine_core.runs.state_files import load_tensors, save_tensors
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.transport_bench import TransportBench, same_weights


@contract(catches=("the last bucket lost",))
def every_receiver_gets_all_weights_bit_for_bit(bench: TransportBench) -> None:
    """In every update, each receiver gets every tensor bit for bit, in the order of the stream.

    Names, types and shapes are equal too. Cases: tensors that are empty, not contiguous, or larger than a bucket.
    """
    link, received = bench.link(), []
    assert link is not None
    for number in (1, 2, 3):
        got = bench.whole(link, bench.weights(number).items(), WeightUpdate(number, number - 1))
        received.append([(name, tensor.clone()) for name, tensor in got] if link.endpoint.index else [])
    for number, found in enumerate(received if link.endpoint.index else [], 1):
        same_weights(found, bench.weights(number), f"of update {number}")


@contract(catches=("bytes counted for each receiver",))
def bytes_are_counted_once(bench: TransportBench) -> None:
    """``send`` returns the size of the weights in bytes, not multiplied by the number of receivers.

    Gaps between tensors do not count.
    """
    link, weights = bench.link(), bench.weights()
    assert link is not None
    sent = bench.whole(link, weights.items(), WeightUpdate(1, 1))
    expected = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if link.endpoint.index == 0:
        assert sent == expected, f"send returned {sent}; expected {expected} bytes."


@contract(catches=("buffers reused while the receiver holds them",))
def tensors_are_the_receivers_to_keep(bench: TransportBench) -> None:
    """Received tensors stay unchanged while later updates arrive over the same link."""
    link = bench.link()
    assert link is not None
    received = [
        bench.whole(link, bench.weights(seed).items(), WeightUpdate(seed + 1, seed)) for seed in range(3)
    ]
    if link.endpoint.index:
        for seed, kept in enumerate(received):
            same_weights(kept, bench.weights(seed), f"of update {seed + 1}, looked at after update 3,")


@contract(catches=("a stream that is not run to its end",))
def the_stream_is_run_to_its_end_once(bench: TransportBench) -> None:
    """``send`` reads the stream to its end, with every tensor.

    The ranks of the trainer gather together, so a sender that stops early leaves the others waiting.
    """
    link, ended = bench.link(), []
    assert link is not None

    def stream() -> Iterator[tuple[str, Tensor]]:
        """Yield the weights [D_1, D_2, ...] and note the end of the stream."""
        yield from bench.weights().items()
        ended.append(True)

    bench.whole(link, stream(), WeightUpdate(1, 1))
    if link.endpoint.index == 0:
        assert ended == [True], f"The stream of the sender came to its end {len(ended)} times; expected once."


@contract()
def links_do_not_meet(bench: TransportBench) -> None:
    """If the same processes have two links open, each link carries its own updates."""
    links = {label: bench.link(label) for label in ("one", "two")}
    for number in (1, 2):
        for seed, (label, link) in enumerate(links.items(), 10 * number):
            assert link is not None
            weights = bench.weights(seed)
            got = bench.whole(link, weights.items(), WeightUpdate(number, seed))
            if link.endpoint.index:
                same_weights(got, weights, f"over link '{label}'")


@contract()
def weights_cut_in_one_way_reach_receivers_that_cut_them_in_another(bench: TransportBench) -> None:
    """If receivers shard weights differently from the senders, they still get every weight bit for bit.

    Half of the ranks hold rows each and gather whole tensors, all of them in step. Each of the others keeps columns
    of what arrives.
    """
    senders = bench.ranks[: max(1, len(bench.ranks) // 2)]
    receivers = bench.ranks[len(senders) :]
    whole = bench.weights(5)
    names = ["z.embed.weight", "a.head.weight"]
    group = dist.new_group(list(senders), backend="gloo")  # collective over all ranks
    link = bench.link(ranks=[0, *receivers])
    if bench.rank in senders:
        own = {name: whole[name].chunk(len(senders))[bench.rank].cpu() for name in names}
        stream = _gathered(own, whole, senders, group, bench.device)
        if link is None:
            for _ in stream:
                pass
        else:
            bench.whole(link, stream, WeightUpdate(1, 1))
        return
    assert link is not None
    place = bench.rank - receivers[0]
    came = bench.whole(link, (), WeightUpdate(1, 1))
    kept = {name: tensor.chunk(len(receivers), dim=1)[place] for name, tensor in came}
    expected = {name: whole[name].chunk(len(receivers), dim=1)[place] for name in names}
    same_weights(list(kept.items()), expected, f"as columns of receiver {place}")


def _gathered(
    own: dict[str, Tensor],
    whole: dict[str, Tensor],
    senders: Sequence[int],
    group: Any,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Stream like a sharded engine: all ranks that hold rows assemble each tensor when it is requested.

    Args:
        own: this rank's rows by name, [rows, columns].
        whole: the tensors by name, [sum of all rows, columns].
    """
    for name, part in own.items():
        rows = [len(each) for each in whole[name].chunk(len(senders))]
        parts = [torch.zeros(count, part.shape[1], dtype=part.dtype) for count in rows]
        for rank, taken in zip(senders, parts, strict=True):
            if rank == dist.get_rank():
                taken.copy_(part)
            dist.broadcast(taken, rank, group=group)
        yield name, torch.cat(parts).to(device)


@contract(package="peft")
def an_adapter_alone_arrives_before_the_model_would(bench: TransportBench) -> None:
    """The stream of a LoRA adapter holds its configuration, then its tensors, and nothing of the base.

    The engine is ``torch``. The tensors have the names of an adapter file.
    """
    link, file = bench.link(), bench.folder / "adapter.safetensors"
    assert link is not None
    path = bench.model()
    if link.endpoint.index == 0:
        plugins = bench.load_plugins(train_engines="torch")
        options = plugins.spec("train_engines", "torch").config.model_validate({"param_dtype": "fp32"})
        config = RoleConfig(backend="torch", optim=OptimConfig(), options=options, lora=LoRAConfig(rank=2))
        context = WorkerContext(plugins=plugins, role="actor", device=bench.device)
        engine = plugins.resolve("train_engines", "torch")(config, ModelConfig(path=path), context)
        bench.stack.callback(engine.close)
        save_tensors(file, dict(stream_of(engine, adapter=True)))
        bench.whole(link, stream_of(engine, adapter=True), WeightUpdate(1, 3))
        return
    got = bench.whole(link, (), WeightUpdate(1, 3))
    names = [name for name, _ in got]
    assert names[0] == ADAPTER_CONFIG, f"First came '{names[0]}'; expected '{ADAPTER_CONFIG}': {names}."
    about = json.loads(bytes(got[0][1].cpu().numpy()))
    assert about["r"] == 2, f"The adapter's configuration came as {about}; expected rank 2."
    assert all(name.startswith(ADAPTER_PREFIX) and "lora_" in name for name in names[1:]), names
    sent = load_tensors(file)
    assert sorted(sent) == sorted(names), f"Came: {sorted(names)}; sent: {sorted(sent)}."
    same_weights(got, {name: sent[name] for name in names}, "of an adapter")
