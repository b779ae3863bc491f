"""Contracts of a runtime: its start, calls, their order, their receivers and the bytes that are sent."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import ConfigError
from engine_core.types import Batch, LossCall, Sampling, TrainOutput
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.runtime_probe import METRICS, WEIGHTS, described, full_rollout

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_plugin_testing.runtime_bench import RuntimeBench

LENGTHS = [7, 1, 12, 3, 3, 9, 5]


def raised(
    do: Callable[[], Any], kind: type[BaseException] | tuple[type[BaseException], ...]
) -> BaseException:
    """Return the error of these kinds that a call raises."""
    try:
        do()
    except kind as error:
        return error
    raise AssertionError(f"no {kind} was raised")


@contract(catches=("engines left open by a start that fails",))
def a_start_that_fails_tells_why(bench: RuntimeBench) -> None:
    """If an engine cannot be built on one rank, ``start`` raises the engine's error.

    The engines that were built before are closed. Another runtime starts afterwards.
    """

    def start() -> None:
        """Start a runtime of which the last engine fails to build on the last rank."""
        with bench.started({"rollout.probe_sampler.fail": f"ConfigError@{bench.world_size - 1}"}):
            pass

    assert "requested failure" in str(raised(start, ConfigError))
    bench.check_closed(bench.journal)
    _, groups, _ = bench.shared
    assert groups["actor"].call("optimizer_step").result().lr == 0.25


@contract(
    catches=(
        "steps in which a role is idle counted",
        "torch not seeded where engines are built",
        "a reference built to be trained",
    )
)
def every_role_has_a_group_of_its_ranks(bench: RuntimeBench) -> None:
    """Each role of the run has a group with as many ranks as requested.

    An engine knows its rank, whether it is trained, and the ``total_steps`` of the run without the role's ``idle_steps``.
    Where an engine is built, torch is seeded with ``run.seed``, which is also the seed of its context, and ``RANK`` and
    ``WORLD_SIZE`` of a worker process are those of its pool. The controller is seeded, too.
    """
    from engine_plugin_testing.runtime_bench import IDLE, SEED, TOTAL_STEPS

    runtime, groups, journal = bench.shared
    found = {role: group.world_size for role, group in groups.items()}
    assert found == dict.fromkeys(("actor", "ref", "rollout"), bench.world_size), found
    assert bench.seed == SEED, f"torch is seeded with {bench.seed} in the controller; expected {SEED}."
    built: dict[str, dict[str, Any]] = {
        "actor": {"total_steps": TOTAL_STEPS, "trainable": True, "frozen": False},
        "ref": {"total_steps": TOTAL_STEPS - IDLE, "trainable": False, "frozen": True},
        "rollout": {"actor": "probe"},
    }
    for role, expected in built.items():
        for rank, (line,) in enumerate(bench.written(journal, role, "build")):
            place = [rank, bench.world_size]
            expected |= {"seeds": [SEED, SEED], "place": place}
            expected |= {} if runtime.in_process else {"launched": place}
            known = {name: line[name] for name in expected}
            assert known == expected, f"{role}[{rank}] was built with {known}; expected {expected}."


@contract(catches=("metrics rounded to float32", "the number of micro-batches lost"))
def values_cross_exactly(bench: RuntimeBench) -> None:
    """The caller gets exactly the values that a rank returned.

    Cases: floats, infinities, the smallest float and truth values. A loss arrives as it was sent.
    """
    _, groups, journal = bench.shared
    batch = bench.batch(LENGTHS)
    options = {
        "clip": (0.1 + 0.2, -math.inf),
        "on": True,
        "of": None,
        "names": ["\u00e9"],
        "table": {"a": 2**60},
    }
    loss = LossCall("policy", options, ("log_probs", "entropy"), ("values",))
    output = groups["actor"].call("forward_backward", batch, loss=loss).result()
    for lines in bench.written(journal, "actor", "forward_backward"):
        found = _untupled(lines[-1]["loss"])
        assert found == _untupled(described(loss)), found
    assert described(output) == described(TrainOutput(0.1 + 0.2, dict(METRICS), 3)), output
    step = groups["actor"].call("optimizer_step").result()
    assert (math.inf, 0.25, True) == (step.grad_norm, step.lr, step.skipped), step


@contract(
    catches=(
        "keep_together lost",
        "columns rounded to float32",
        "the temperature of a batch lost",
        "columns with K values cut",
    )
)
def every_column_of_a_batch_crosses(bench: RuntimeBench) -> None:
    """Every column of a batch arrives bit for bit.

    Columns have every type, per token with one value and with K, and per sequence; ``keep_together``, ``temperature``
    and ``top_k`` arrive too. A rank gets the whole batch or its own sequences. Sequences with one ``keep_together``
    id are on one rank, and outputs come back in the order of the batch.
    """
    _, groups, journal = bench.shared
    whole = _full_batch(bench)
    assert whole.keep_together is not None
    for split in ("all", "dp"):
        before = [len(lines) for lines in bench.written(journal, "ref", "columns")] or [0] * bench.world_size
        found = groups["ref"].call("infer", whole, split=split, outputs=("columns",)).result()
        lines = [lines[n] for lines, n in zip(bench.written(journal, "ref", "columns"), before, strict=True)]
        assert (
            split == "all"
            or sorted(n for line in lines for n in line["together"]) == whole.keep_together.tolist()
        ), f"keep_together of the ranks: {[line['together'] for line in lines]}."
        for rank, line in enumerate(lines):
            own = [i for i, id in enumerate(whole.keep_together.tolist()) if id in line["together"]]
            expected = _sequences(whole, own)
            assert sorted(line["together"]) == [int(whole.keep_together[i]) for i in own], (
                f"{split}: sequences that belong together were separated: rank {rank} has {line['together']}."
            )
            assert line["batch"] in [
                _json(described(_sequences(whole, order))) for order in _orders(own, line, whole)
            ], (
                f"{split}: rank {rank} received {line['batch']}; expected {described(expected)} or another order."
            )
        for name, column in whole.tokens.items():
            assert described(found[name]) == described(column), (
                f"{split}: '{name}' came back as {found[name]}."
            )


def _full_batch(bench: RuntimeBench) -> Batch:
    """Return sequences in pairs that belong together, with columns of every type."""
    batch = bench.batch([7, 1, 12, 3, 3, 9, 5, 2])
    at = batch.token_ids
    tokens = {
        "bits": at % 3 == 0,
        "double": at.double() / 3,
        "half": at.bfloat16() / 7,
        "odd": torch.tensor([math.nan, math.inf, -math.inf, -0.0])[at % 4],
        "ids": torch.stack([at, -at, at + 2**30]).T.int(),  # not contiguous
        "small": (at - 20).to(torch.int8),
    }
    together = torch.arange(len(batch)) // 2
    sequences = {"rewards": together.double() / 7, "valid": together % 2 == 0, "group_ids": together + 2**40}
    return dataclasses.replace(
        batch, tokens=tokens, sequences=sequences, temperature=0.7, keep_together=together, top_k=3
    )


def _sequences(batch: Batch, chosen: list[int]) -> Batch:
    """Return some sequences of a batch, put together one by one."""
    parts = {name: column.split(batch.lengths.tolist()) for name, column in batch.tokens.items()}
    ids = batch.token_ids.split(batch.lengths.tolist())
    return dataclasses.replace(
        batch,
        token_ids=torch.cat([ids[i] for i in chosen]) if chosen else batch.token_ids[:0],
        lengths=batch.lengths[chosen],
        tokens={
            name: torch.cat([column[i] for i in chosen]) if chosen else batch.tokens[name][:0]
            for name, column in parts.items()
        },
        sequences={name: column[chosen] for name, column in batch.sequences.items()},
        keep_together=None if batch.keep_together is None else batch.keep_together[chosen],
    )


def _orders(own: list[int], line: dict[str, Any], batch: Batch) -> list[list[int]]:
    """Return the orders of a rank's sequences, of which it knows the ids, in which pairs are in either order."""
    assert batch.keep_together is not None
    ids = batch.keep_together.tolist()
    orders: list[list[int]] = [[]]
    for id in line["together"]:
        orders = [[*order, i] for order in orders for i in own if ids[i] == id and i not in order]
    return orders


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _untupled(value: Any) -> Any:
    """Return a description in which tuples are lists, as JSON has them."""
    return json.loads(json.dumps(value).replace('"tuple"', '"list"'))


@contract()
def a_rank_receives_the_bytes_of_its_own_sequences(bench: RuntimeBench) -> None:
    """If a batch is split among ranks, they receive its bytes only once in total.

    With ``all`` each rank receives all bytes.
    """
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


@contract(catches=("all requests of a call given to one sampler",))
def rollouts_come_in_the_order_of_their_requests(bench: RuntimeBench) -> None:
    """``generate`` and ``stream`` sample every request exactly once, and every rank samples.

    Each rollout has the controller's own prompt.
    """
    _, groups, journal = bench.shared
    before = [len(lines) for lines in bench.written(journal, "rollout", "step")]
    requests = bench.requests(9)
    found = groups["rollout"].call("generate", requests=requests).result()
    assert [rollout.request_id for rollout in found] == [request.id for request in requests], found
    for rollout, request in zip(found, requests, strict=True):
        assert rollout.prompt is request.prompt
        assert rollout.token_ids.tolist()[:-1] == [*request.prompt.token_ids, request.index]
    parts = [rollout for part in groups["rollout"].stream(requests) for rollout in part]
    assert sorted(rollout.request_id for rollout in parts) == sorted(request.id for request in requests)
    after = [len(lines) for lines in bench.written(journal, "rollout", "step")]
    shares = [count - (before[rank] if before else 0) for rank, count in enumerate(after)]
    assert min(shares) > 0, f"Of 18 requests the ranks have sampled {shares}."


@contract(catches=("requests of a closed stream that stay in the sampler",))
def a_stream_that_is_closed_leaves_no_request(bench: RuntimeBench) -> None:
    """After a caller has closed ``stream``, a call samples its own requests alone, also those with the same ids."""
    _, groups, _ = bench.shared
    stream = groups["rollout"].stream(bench.requests(9))
    next(stream)
    stream.close()
    for count in (3, 11):
        requests = bench.requests(count)
        found = [rollout.request_id for part in groups["rollout"].stream(requests) for rollout in part]
        assert sorted(found) == sorted(request.id for request in requests), found


@contract(
    catches=(
        "a sampling option lost",
        "extras of rollouts lost",
        "the failure of a rollout lost",
        "the tokens of begun lost",
        "the prompt of another request with the same id",
    )
)
def every_field_of_requests_and_rollouts_crosses(bench: RuntimeBench) -> None:
    """Every field of a request reaches the sampler bit for bit, and every field of a rollout reaches the caller.

    The request has every option set and a response in ``begun``. The prompts have one id and differ. The rollout
    has text, rewards, answers, messages, failure and extras of every type.
    """
    _, groups, journal = bench.shared
    before = [len(lines) for lines in bench.written(journal, "rollout", "add")] or [0] * bench.world_size
    options: dict[str, Any] = {field.name: _other(field.name) for field in dataclasses.fields(Sampling)}
    requests = []
    for request in bench.requests(4, do="full", row={"deep": [None, 0.1, {"\u00e9": True}]}):
        request.prompt.id, request.prompt.text = "p", f"\u00e9\n{request.id}"
        full = dataclasses.replace(request, sampling=Sampling(**options))
        requests.append(dataclasses.replace(full, begun=full_rollout(full)))
    found = groups["rollout"].call("generate", requests=requests).result()
    for rollout, request in zip(found, requests, strict=True):
        assert rollout.prompt is request.prompt
        assert described(rollout) == described(full_rollout(request)), (
            f"{rollout}; expected {full_rollout(request)}."
        )
    lines = [
        line
        for lines, n in zip(bench.written(journal, "rollout", "add"), before, strict=True)
        for line in lines[n:]
    ]
    asked = [entry for line in lines for entry in line["asked"][1]]
    for request in requests:
        expected = _untupled(described(request))
        near = [_untupled(entry) for entry in asked if entry[1]["id"] == described(request.id)]
        assert near == [expected], f"'{request.id}' arrived as {near}; expected {expected}."


def _other(name: str) -> Any:
    """Return a value of a sampling option that is not its default."""
    values = {
        "temperature": 0.7,
        "stop": ("\u00e9\n", "end"),
        "stop_token_ids": (3, 2**31),
        "log_probs": False,
        "timeout_s": 1e5,
    }
    default = getattr(Sampling(), name)
    return values.get(name, default / 2 if isinstance(default, float) else (default or 0) + 11)


@contract(catches=("the weights of the first push sent again",))
def pushed_weights_reach_every_sampler_whole(bench: RuntimeBench) -> None:
    """A push brings the actor's weights to every rank of the sampler bit for bit. A second push brings those of a later step.

    It returns version, bytes and checksum.
    """
    runtime, groups, journal = bench.shared
    for version in (7, 8):
        groups["actor"].call("optimizer_step").result()
        steps = bench.written(journal, "actor", "optimizer_step")[0][-1]["number"]
        result = runtime.push_weights("actor", "rollout", version)
        digest = hashlib.sha256()
        for name, size in WEIGHTS.items():
            digest.update(name.encode() + (torch.arange(size, dtype=torch.float32) + steps).numpy().tobytes())
        size = 4 * sum(WEIGHTS.values())
        assert (result.version, result.checksum) == (version, digest.hexdigest()), result
        assert result.bytes == size * bench.world_size, result
        for rank, lines in enumerate(bench.written(journal, "rollout", "update_weights")):
            assert (lines[-1]["bytes"], lines[-1]["checksum"]) == (size, digest.hexdigest()), rank
        answer = groups["rollout"].call("generate", requests=bench.requests(2)).result()
        assert [rollout.policy_versions.tolist()[-1] for rollout in answer] == [version] * 2
