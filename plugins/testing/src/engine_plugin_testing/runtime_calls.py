"""Contracts of a runtime: calls, their order, their receivers and the bytes that are sent."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from engine_core.types import LossCall
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.runtime_probe import WEIGHTS

if TYPE_CHECKING:
    from engine_plugin_testing.runtime_bench import RuntimeBench

LENGTHS = [7, 1, 12, 3, 3, 9, 5]


@contract()
def every_role_has_a_group_of_its_ranks(bench: RuntimeBench) -> None:
    """Each role of the run has a group, of as many ranks as were asked for."""
    _, groups, _ = bench.shared
    found = {role: group.world_size for role, group in groups.items()}
    assert found == dict.fromkeys(("actor", "ref", "rollout"), bench.world_size), found


@contract()
def calls_are_carried_out_in_the_order_in_which_they_were_sent(bench: RuntimeBench) -> None:
    """A hundred calls without a wait, large and small ones in turn, reach every rank in their order."""
    _, groups, journal = bench.shared
    before = [len(lines) for lines in bench.written(journal, "actor")]
    sizes = [40_000 if i % 7 == 0 else 2 + i for i in range(50)]
    sent = []
    for size in sizes:
        sent.append(groups["actor"].call("infer", bench.batch([size]), split="all", outputs=("double",)))
        sent.append(groups["actor"].call("optimizer_step"))
    for future in sent:
        future.result()
    expected = [entry for size in sizes for entry in (("infer", [size]), ("optimizer_step", None))]
    for rank, lines in enumerate(bench.written(journal, "actor")):
        skipped = before[rank] if before else 0
        found = [(line["method"], line.get("lengths")) for line in lines[skipped:]]
        assert found == expected, f"rank {rank}: {found[:20]} ..."


@contract()
def values_cross_exactly(bench: RuntimeBench) -> None:
    """Floats, infinities, the smallest float and truth values come back as they were returned."""
    _, groups, _ = bench.shared
    batch = bench.batch(LENGTHS)
    output = groups["actor"].call("forward_backward", batch, loss=LossCall("nll")).result()
    assert output.loss == 0.1 + 0.2, output
    assert output.metrics == {"tiny": 5e-324}, output
    step = groups["actor"].call("optimizer_step").result()
    assert (math.inf, 0.25, True) == (step.grad_norm, step.lr, step.skipped), step


@contract()
def a_batch_is_shared_out_once_and_put_back_in_order(bench: RuntimeBench) -> None:
    """Every sequence goes to one rank, no rank gets another's, and values per token come back in the batch's order."""
    _, groups, journal = bench.shared
    before = [len(lines) for lines in bench.written(journal, "ref", "infer")] or [0] * bench.world_size
    batch = bench.batch(LENGTHS)
    found = groups["ref"].call("infer", batch, outputs=("double",)).result()["double"]
    assert torch.equal(found, batch.token_ids.double() * 2), found
    lines = [
        lines[count:] for lines, count in zip(bench.written(journal, "ref", "infer"), before, strict=True)
    ]
    assert all(len(entry) == 1 for entry in lines), lines
    shared_out = sorted(length for entry in lines for length in entry[0]["lengths"])
    assert shared_out == sorted(LENGTHS), lines


@contract()
def a_rank_receives_the_bytes_of_its_own_sequences(bench: RuntimeBench) -> None:
    """Of a batch that is shared out the ranks receive together its bytes once; with ``all`` each receives all of them."""
    _, groups, journal = bench.shared
    batch = bench.batch([1000, 3000, 2000, 500])
    whole = 8 * (6500 + 4)  # token ids and lengths, int64

    def received(split: str) -> list[int]:
        """Return the bytes that each rank of ``ref`` receives of one call."""
        before = [len(lines) for lines in bench.written(journal, "ref", "infer")] or [0] * bench.world_size
        groups["ref"].call("infer", batch, split=split, outputs=("double",)).result()
        after = bench.written(journal, "ref", "infer")
        return [lines[count]["bytes"] for lines, count in zip(after, before, strict=True)]

    assert sum(received("dp")) == whole, received("dp")
    assert received("all") == [whole] * bench.world_size, received("all")


@contract()
def groups_work_for_themselves(bench: RuntimeBench) -> None:
    """What one role is asked does not reach another."""
    _, groups, journal = bench.shared
    before = [len(lines) for lines in bench.written(journal, "actor")]
    groups["ref"].call("infer", bench.batch(LENGTHS), outputs=("double",)).result()
    assert [len(lines) for lines in bench.written(journal, "actor")] == before


@contract()
def rollouts_come_in_the_order_of_their_requests(bench: RuntimeBench) -> None:
    """``generate`` and ``stream`` sample every request once, and each rollout has the controller's own prompt."""
    _, groups, _ = bench.shared
    requests = bench.requests(9)
    found = groups["rollout"].call("generate", requests=requests).result()
    assert [rollout.request_id for rollout in found] == [request.id for request in requests], found
    for rollout, request in zip(found, requests, strict=True):
        assert rollout.prompt is request.prompt
        assert rollout.token_ids.tolist()[:-1] == [*request.prompt.token_ids, request.index]
    parts = [rollout for part in groups["rollout"].stream(requests) for rollout in part]
    assert sorted(rollout.request_id for rollout in parts) == sorted(request.id for request in requests)


@contract()
def pushed_weights_reach_every_sampler_whole(bench: RuntimeBench) -> None:
    """A push brings every rank of the sampler the actor's weights to the bit; version, bytes and checksum are returned."""
    runtime, groups, journal = bench.shared
    groups["actor"].call("optimizer_step").result()
    steps = bench.written(journal, "actor", "optimizer_step")[0][-1]["number"]
    result = runtime.push_weights("actor", "rollout", 7)
    digest = hashlib.sha256()
    for name, size in WEIGHTS.items():
        digest.update(name.encode() + (torch.arange(size, dtype=torch.float32) + steps).numpy().tobytes())
    size = 4 * sum(WEIGHTS.values())
    assert (result.version, result.checksum) == (7, digest.hexdigest()), result
    assert result.bytes == size * bench.world_size, result
    for rank, lines in enumerate(bench.written(journal, "rollout", "update_weights")):
        assert (lines[-1]["bytes"], lines[-1]["checksum"]) == (size, digest.hexdigest()), rank
    answer = groups["rollout"].call("generate", requests=bench.requests(2)).result()
    assert [rollout.policy_versions.tolist()[-1] for rollout in answer] == [7, 7]


@contract()
def a_reference_is_mixed_on_every_rank(bench: RuntimeBench) -> None:
    """``mix_weights`` gives the other role the stream of the first, and the share."""
    runtime, _, journal = bench.shared
    runtime.mix_weights("actor", "ref", 0.25)
    for lines in bench.written(journal, "ref", "load_named_weights"):
        assert lines[-1]["mix"] == 0.25
        assert len(lines[-1]["sums"]) == len(WEIGHTS)


@contract(capability="processes")
def pools_lie_in_processes_of_their_own(bench: RuntimeBench) -> None:
    """Roles of different pools share no process; each pool is a separate world, and weights go from one to the other."""
    changes = {
        "placement.pools": {"train": bench.world_size, "serve": 1},
        "placement.actor": "train",
        "placement.rollout": "serve",
    }
    with bench.started(changes) as (runtime, groups, journal):
        batch = bench.batch(LENGTHS)
        worlds = {
            role: groups[role].call("infer", batch, outputs=("world",)).result()["world"].unique().tolist()
            for role in ("actor", "ref")
        }
        assert worlds == {"actor": [bench.world_size], "ref": [bench.world_size]}, worlds
        assert groups["rollout"].world_size == 1
        result = runtime.push_weights("actor", "rollout", 3)
        assert result.bytes == 4 * sum(WEIGHTS.values()), result
        groups["rollout"].call("generate", requests=bench.requests(3)).result()
        pids = {
            role: {line["pid"] for lines in bench.written(journal, role) for line in lines}
            for role in ("actor", "ref", "rollout")
        }
        assert pids["actor"] == pids["ref"]
        assert len(pids["actor"]) == bench.world_size
        assert not pids["actor"] & pids["rollout"], pids
