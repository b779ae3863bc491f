"""Contracts of updates that fail: refused with both sides named, in time, and a new link carries the next update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine_core.contracts.weight_transport import WeightTransport, WeightUpdate
from engine_core.errors import TrainingFailed
from engine_plugin_processes.worker import closing_stream
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.transport_bench import (
    OTHER_TOKEN,
    TransportBench,
    refusal,
    same_weights,
    trusting,
    whole_or_told,
)
from engine_plugin_testing.transport_damage import MISPLACED

FIRST_OF_SECOND = 2  # tensors of the kit's weights of which the first bucket has fewer
LATE_SECONDS = 0.4
LOST = "a rank of the trainer was lost"
UPDATE = WeightUpdate(1, 7)  # the first, of version 7
OTHERS = (WeightUpdate(1, 6), WeightUpdate(2, 7), WeightUpdate(2, 8))  # expected in its place


@contract(
    catches=(
        "a checksum that is never compared",
        "a checksum that is a plain sum",
        "a checksum of the first buckets only",
        "a checksum of each chunk of 8 MiB without its place",
    )
)
def a_damaged_bucket_is_refused(bench: TransportBench) -> None:
    """A damaged bucket reaches no engine. Every receiver raises ``TrainingFailed`` and names both sides.

    Damage is any byte that differs from the sender's checksum, also swapped words or tensors, near or 16 MiB apart. The
    tensors before are as they were sent, and a new link brings a whole update.
    """
    for number, way in enumerate(bench.ways):
        link, weights = bench.link(f"link{number}"), bench.weights_for(way)
        assert link is not None
        if link.endpoint.index == 0:
            with bench.damage(way):
                send = partial(bench.update, link, weights.items(), UPDATE)
                whole_or_told(bench, link, send, f"Damaged: {way}")
        else:
            _refuse_damaged(bench, link, way)
        _again(bench, link, f"refused{number}")


def _refuse_damaged(bench: TransportBench, link: WeightTransport, way: str) -> None:
    taken: list[tuple[str, Tensor]] = []
    error = refusal(
        bench, link, lambda: bench.in_time(lambda: taken.extend(link.receive(UPDATE))), f"A damaged bucket ({way})"
    )  # fmt: skip
    assert "checksum" in str(error), (
        f"The error does not say that a checksum is wrong: {error}. If the transport does not cut the stream by "
        "`flat_buckets`, give the suite its own `damage`."
    )
    weights = bench.weights_for(way)
    for name, tensor in taken:
        assert torch.equal(tensor.cpu(), weights[name].cpu()), f"'{name}' was given though it is damaged."


@contract(catches=("any version accepted", "any number accepted"))
def an_update_of_another_version_is_refused(bench: TransportBench) -> None:
    """If receivers get an update that they do not expect, each raises ``TrainingFailed`` within the timeout.

    It has another version, another number or both. The error names both sides, and no tensor is given.
    """
    receivers = len(bench.ranks) - 1
    for number in range(0, len(OTHERS), receivers):
        others = OTHERS[number : number + receivers]
        link = bench.link(f"link{number}", soon=True)
        assert link is not None
        if link.endpoint.index == 0:
            _others(bench, link, "An update of another version")
        else:
            expected = others[(link.endpoint.index - 1) % len(others)]
            taken: list[Any] = []
            receive = partial(_take, bench, link, expected, taken)
            refusal(bench, link, receive, f"{UPDATE} for {expected}")
            assert not taken, f"{len(taken)} tensors of {UPDATE} were given to a receiver of {expected}."
        _again(bench, link, f"refused{number}")


def _take(bench: TransportBench, link: WeightTransport, update: WeightUpdate, taken: list[Any]) -> None:
    """Receive an update into ``taken``, in time."""
    bench.in_time(lambda: taken.extend(link.receive(update)))


@contract(catches=("a bucket of another update", "a bucket twice"))
def a_bucket_that_does_not_follow_is_refused(bench: TransportBench) -> None:
    """A bucket that is not the next one of its update reaches no engine, though its checksum is right.

    It has the version of the update, and the number of another update or that of the bucket before. Every receiver raises
    ``TrainingFailed``, and a new link brings a whole update. The contract is empty for a suite with its own ``damage``.
    """
    for number, way in enumerate(MISPLACED if len(bench.ways) > 1 else ()):
        link, weights = bench.link(f"link{number}"), bench.weights()
        assert link is not None
        if link.endpoint.index == 0:
            with bench.damage(way):
                whole_or_told(bench, link, partial(bench.update, link, weights.items(), UPDATE), way)
        else:
            taken: list[tuple[str, Tensor]] = []
            refusal(bench, link, partial(_take, bench, link, UPDATE, taken), way)
            first = dict(list(weights.items())[: len(taken)])
            same_weights(taken, first, f"before {way}")
            assert len(taken) < FIRST_OF_SECOND, (
                f"After {way} tensors were given: {[name for name, _ in taken]}."
            )
        _again(bench, link, f"refused{number}")


@contract(capability="confirms", catches=("a sender that does not wait for its receivers",))
def a_sender_waits_until_every_receiver_has_all(bench: TransportBench) -> None:
    """``send`` returns after every receiver has verified the whole update, and raises if one wants no more of it.

    Runs if the suite says that the transport ``confirms``. Others only promise that each receiver raises.
    """
    link, late = bench.link(), bench.folder / "has-all"
    assert link is not None
    if link.endpoint.index == 0:
        bench.update(link, bench.weights().items(), UPDATE)
        assert late.exists(), "send returned before the last receiver had taken the update."
    elif _is_last(link):
        stream = link.receive(UPDATE)
        bench.in_time(lambda: next(stream))
        time.sleep(LATE_SECONDS)
        late.touch()
        bench.in_time(lambda: list(stream))
    else:
        bench.update(link, (), UPDATE)
    bench.all_here("taken")
    link.close()
    link = bench.link("left")
    assert link is not None
    if link.endpoint.index == 0:
        send = partial(bench.update, link, bench.weights().items(), UPDATE)
        refusal(bench, link, send, "A receiver that wants no more", last=True)
    elif _is_last(link):
        stream = link.receive(UPDATE)
        bench.in_time(lambda: next(stream))
        bench.in_time(stream.close)
    else:
        _others(bench, link, "A receiver that wants no more")
    _again(bench, link, "left")


@contract(catches=("a broken stream taken for a whole one",))
def a_stream_that_fails_is_told_to_every_receiver(bench: TransportBench) -> None:
    """If the trainer's stream fails, ``send`` raises its error, and every receiver learns of it at once."""
    link = bench.link()
    assert link is not None

    def broken() -> Iterator[tuple[str, Tensor]]:
        """Yield four weights [D_1, D_2, ...], then raise an ``OSError``."""
        yield from list(bench.weights().items())[:4]
        raise OSError(LOST)

    if link.endpoint.index == 0:
        raised = ""
        try:
            bench.update(link, broken(), UPDATE)
        except OSError as error:
            raised = str(error)
        assert raised == LOST, f"send raised '{raised}'; expected the error of its stream, '{LOST}'."
    else:
        refusal(bench, link, lambda: bench.update(link, (), UPDATE), "A stream that failed")
    _again(bench, link, "reported")


@contract()
def a_receiver_that_is_asleep_holds_up_nobody(bench: TransportBench) -> None:
    """If a receiver's engine refuses an update, no other receiver is delayed.

    It refuses before it reads the stream. The others finish or fail without waiting for the timeout, and all take the
    next update.
    """
    link = bench.link()
    assert link is not None
    if _is_last(link):
        bench.in_time(lambda: _refuse(link.receive(UPDATE)))
    else:
        _others(bench, link, "A receiver that is asleep")
    _again(bench, link, "refused")


def _refuse(stream: Generator[tuple[str, Tensor], None, None]) -> None:
    """Refuse a stream as the worker and an engine that is asleep do."""
    with contextlib.suppress(TrainingFailed), closing_stream(stream):
        raise TrainingFailed("asleep")


@contract(catches=("an error that names another receiver",))
def a_receiver_that_wants_no_more_holds_up_nobody(bench: TransportBench) -> None:
    """If a receiver closes the stream after its first tensor, no other receiver is delayed.

    The others finish or fail without waiting for the timeout.
    """
    link = bench.link()
    assert link is not None
    if _is_last(link):
        stream = link.receive(UPDATE)
        first = bench.in_time(lambda: next(stream))
        same_weights([first], {first[0]: bench.weights()[first[0]]}, "before the rest was refused")
        bench.in_time(stream.close)
    else:
        _others(bench, link, "A receiver that wants no more")
    _again(bench, link, "closed")


@contract(
    catches=("a receiver that waits for ever", "a receiver that waits for ever for the rest of an update")
)
def a_sender_that_does_not_send_is_told_in_time(bench: TransportBench) -> None:
    """Receivers that get nothing, or only the beginning of an update, raise ``TrainingFailed`` within their timeout.

    The error says who waited for whom, and names the key of the timeout.
    """
    link = bench.link(soon=True)
    assert link is not None
    if link.endpoint.index:
        _late(bench, link, "A sender that does not send")
    _again(bench, link, "late")
    link = bench.link("stops", soon=True)
    assert link is not None
    if link.endpoint.index:
        _late(bench, link, "A sender that stops in the middle")
        bench.all_here("late again")
    else:
        with contextlib.suppress(OSError, TrainingFailed):  # the receivers have left
            bench.update(link, _stops(bench), UPDATE)
    _again(bench, link, "stopped")


def _late(bench: TransportBench, link: WeightTransport, what: str) -> None:
    """Receive an update that does not come; the error must name the key of the timeout."""
    error = refusal(bench, link, lambda: bench.update(link, (), UPDATE), what)
    key = f"rollout.{bench.name.rpartition(':')[2]}."
    assert key in str(error), f"{what}: the error does not name the key of the time-out ({key}...): {error}"


def _stops(bench: TransportBench) -> Iterator[tuple[str, Tensor]]:
    """Yield four weights [D_1, D_2, ...], and no more until every receiver has given up; then raise an ``OSError``."""
    yield from list(bench.weights().items())[:4]
    bench.all_here("late again")
    raise OSError(LOST)


@contract(catches=("weights taken from a stranger", "weights given to a stranger"))
def a_process_without_the_token_is_kept_out(bench: TransportBench) -> None:
    """A process that knows the addresses of a link, but not the run's token, gets no weights and brings none.

    It accepts any token itself. If it calls before the sender does, the sender's update still arrives and raises nothing.
    """
    link, weights = bench.link(), bench.weights()
    assert link is not None
    if link.endpoint.index == 0:
        with trusting(), contextlib.suppress(Exception):
            bench.in_time(lambda: _intrude(bench))
    try:
        got = bench.update(link, weights.items(), UPDATE)
    except TrainingFailed as error:
        raise AssertionError(f"A call of a stranger without the token ended the update: {error}") from error
    if link.endpoint.index:
        same_weights(got, weights, "of the sender, after a call of a stranger without the token")
    bench.all_here("called")
    link.close()
    last = bench.ranks[-1]
    with trusting() if bench.rank == last else contextlib.nullcontext():
        stranger = OTHER_TOKEN if bench.rank == last else ""
        link = bench.link("taken", soon=True, token=stranger, may_fail=True)
        taken: list[tuple[str, Tensor]] = []
        if link is not None and bench.rank == last:
            with contextlib.suppress(Exception):
                bench.in_time(lambda: taken.extend(link.receive(UPDATE)))
        elif link is not None:
            _others(bench, link, "A receiver without the token")
    assert not taken, f"A receiver that does not know the run's token got {len(taken)} tensors."
    bench.all_here("kept out")
    if link is not None:
        link.close()
    bench.goes_on()


def _intrude(bench: TransportBench) -> None:
    """Send other weights of the same update to the receivers of the first link, with another token."""
    stranger = bench.endpoint("link", bench.ranks, soon=True, token=OTHER_TOKEN)
    stranger.open()
    stranger.join(bench.peers["link"])
    stranger.send(iter(bench.weights(seed=98).items()), UPDATE)


@contract()
def a_receiver_that_does_not_take_is_waited_for_in_bounds(bench: TransportBench) -> None:
    """If a receiver stops reading, the sender and the other receivers are delayed by at most the timeout.

    They finish, or raise ``TrainingFailed`` with both sides.
    """
    link = bench.link(soon=True)
    assert link is not None
    if _is_last(link):
        stream = link.receive(UPDATE)
        bench.in_time(lambda: next(stream))
        bench.all_here("ended")
        link.close()
        with contextlib.suppress(TrainingFailed):
            bench.in_time(stream.close)
    else:
        _others(bench, link, "A receiver that does not take")
        bench.all_here("ended")
        link.close()
    bench.goes_on()


@contract()
def a_sender_that_dies_is_told_in_time(bench: TransportBench) -> None:
    """If the sender's process is killed during an update, every receiver raises ``TrainingFailed`` within the timeout.

    The error names both sides. With another process in its place, a new link works.
    """
    if bench.rank == 0:
        bench.dies("link")
    else:
        link = bench.link(soon=True)
        assert link is not None
        refusal(bench, link, lambda: bench.update(link, (), UPDATE), "A sender that was killed")
        link.close()
    bench.all_here("reported")
    bench.goes_on()


@contract()
def a_receiver_that_dies_is_told_in_time(bench: TransportBench) -> None:
    """If a receiver's process is killed during an update, the others finish or raise ``TrainingFailed`` within the timeout.

    The error names both sides. A new link works without it, and with another process in its place.
    """
    last, link = bench.ranks[-1], None
    if bench.rank == last:
        bench.dies("link")
    else:
        link = bench.link(soon=True)
        assert link is not None
        _others(bench, link, "A receiver that was killed")
    bench.all_here("reported")
    if link is not None:
        link.close()
    if len(bench.ranks) > 2:
        bench.goes_on("without", [rank for rank in bench.ranks if rank != last])
    bench.goes_on()


def _is_last(link: WeightTransport) -> bool:
    """Return whether this endpoint is the receiver that misbehaves."""
    return 0 < link.endpoint.index == len(link.endpoint.names) - 1


def _others(bench: TransportBench, link: WeightTransport, what: str) -> None:
    """Run the update at an endpoint that behaves correctly: it completes, or raises ``TrainingFailed`` in time.

    The sender's error names the last receiver if it is that one which fails.
    """
    update = partial(bench.update, link, bench.weights().items(), UPDATE)
    whole_or_told(bench, link, update, what, last=what.startswith("A receiver"))


def _again(bench: TransportBench, link: WeightTransport, what: str) -> None:
    """Wait until all ranks have come to ``what``, then check that a new link carries a whole update."""
    bench.all_here(what)
    link.close()
    bench.goes_on(f"again-{what}")
