"""The contract, of every transport between processes: whole, checked, in time, or refused with both sides named."""

import pytest
import torch

from engine_core.contracts.weight_transport import WeightUpdate
from engine_core.errors import TrainingFailed
from engine_plugin_processes.transports import bucketing
from engine_plugin_processes.transports.bucketing import flat_buckets
from engine_plugin_processes.worker import closing_stream

ACROSS = ["tcp", "broadcast", "ipc"]
SECONDS = 30


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("bucket", [1, 500, 1 << 20])
def test_every_receiver_gets_all_weights_bit_for_bit(link, weights, monkeypatch, name, bucket):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", bucket)
    ends = link(name, receivers=2)
    for number in (1, 2, 3):  # one link, update after update
        sent, taken = ends.update(number=number, version=number - 1)
        for received in taken:
            found = dict(received.result(SECONDS))
            assert sorted(found) == sorted(weights)
            assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
            assert all(found[name].dtype == tensor.dtype for name, tensor in weights.items())
        assert sent.result(SECONDS) == sum(t.numel() * t.element_size() for t in weights.values())


@pytest.mark.parametrize("name", ACROSS)
def test_a_stream_that_fails_is_told_to_who_takes_and_raised_where_it_failed(
    link, weights, monkeypatch, name
):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)

    def broken():
        yield from list(weights.items())[:2]
        raise OSError("lost")

    sent, (taken,) = link(name).update(broken())
    with pytest.raises(OSError, match="lost"):
        sent.result(SECONDS)
    with pytest.raises(
        TrainingFailed,
        match=r"from actor\[0\] on here to rollout\[1\] on there .*stream of weights broke off",
    ):
        taken.result(SECONDS)


@pytest.mark.parametrize("name", ["tcp", "broadcast", "ipc"])
def test_a_damaged_bucket_is_found_and_refused_and_the_other_receivers_have_all(
    link, weights, monkeypatch, name
):
    """Found by each receiver for itself: one whose memory is damaged holds up nobody."""
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)
    ends = link(name, receivers=2)
    honest, damaged = bucketing.checksum, ends.ends[1]

    def checked(endpoint, update, header, expected, data):
        if endpoint is damaged.endpoint and expected == 1:
            data[0] ^= 1
        return verify(endpoint, update, header, expected, data)

    module = __import__(type(damaged).receive.__module__, fromlist=["verify"])
    verify = module.verify
    monkeypatch.setattr(module, "verify", checked)
    sent, taken = ends.update()
    with pytest.raises(
        TrainingFailed, match=r"'\w+', policy version 7\): bucket 1 came damaged: its checksum"
    ):
        taken[0].result(SECONDS)
    if name == "broadcast":  # with tcp the sender sees the connection end, and the update fails for all
        assert sorted(n for n, _ in taken[1].result(SECONDS)) == sorted(weights)
        assert sent.result(SECONDS) > 0
    assert bucketing.checksum is honest


@pytest.mark.parametrize("name", ACROSS)
def test_a_sender_that_does_not_send_is_told_in_time_with_both_sides_and_the_key(link, name):
    ends = link(name, timeout_seconds=0.5)
    with pytest.raises(
        TrainingFailed, match=rf"from actor\[0\] on here to rollout\[1\].*rollout\.{name}\.timeout_seconds"
    ):
        list(ends.ends[1].receive(WeightUpdate(1, 7)))


@pytest.mark.parametrize("name", ["tcp", "broadcast", "ipc"])
def test_a_sender_that_ends_on_the_way_is_told(link, weights, monkeypatch, name):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)
    ends = link(name, timeout_seconds=2)

    def dies():
        yield next(iter(weights.items()))
        ends.ends[0].close()
        raise SystemExit

    monkeypatch.setattr(ends.ends[0], "_post", _nothing_more(ends.ends[0])) if name == "broadcast" else None
    sent, (taken,) = ends.update(dies())
    with pytest.raises(TrainingFailed, match=r"from actor\[0\] on here to rollout\[1\] on there"):
        taken.result(SECONDS)
    with pytest.raises((SystemExit, TrainingFailed)):
        sent.result(SECONDS)


def _nothing_more(end):
    """Of a process that has ended nothing comes: not even why."""
    post = end._post

    def posted(header, flat, update):
        return [] if "break" in header else post(header, flat, update)

    return posted


@pytest.mark.parametrize("name", ["tcp", "broadcast", "ipc"])
def test_a_receiver_that_takes_no_more_is_told_to_the_sender_in_time(link, weights, monkeypatch, name):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)
    ends = link(name, timeout_seconds=1)

    def first_only(at, update):
        stream = at.receive(update)
        next(stream)
        at._drain = lambda update: None  # as one that has ended
        at.close()
        stream.close()

    sent, (taken,) = ends.update(take=first_only)
    taken.result(SECONDS)
    with pytest.raises(TrainingFailed, match=r"from actor\[0\] on here to rollout\[1\] on there"):
        sent.result(SECONDS)


def test_a_receiver_that_wants_no_more_holds_up_nobody(link, weights, monkeypatch):
    """An engine that refuses an update; the next one is taken by all."""
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)
    ends = link("broadcast", receivers=2)

    def take(at, update):
        stream = at.receive(update)
        found = [next(stream)] if at is ends.ends[1] else list(stream)
        stream.close()
        return found

    sent, taken = ends.update(take=take)
    assert [len(each.result(SECONDS)) for each in taken] == [1, 4]
    assert sent.result(SECONDS) > 0
    sent, taken = ends.update(number=2, version=8)
    assert [len(each.result(SECONDS)) for each in taken] == [4, 4]


def test_a_bucket_lies_whole_until_the_one_after_the_next_is_asked_for(weights, monkeypatch):
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)
    stream = flat_buckets(weights.items(), torch.device("cpu"))
    first = next(stream)
    before = first.data.clone()
    next(stream)
    assert torch.equal(first.data, before)
    assert first.weight_bytes == 50 * 7 * 4


@pytest.mark.parametrize("name", ACROSS)
def test_an_update_of_another_version_is_refused_before_a_tensor_is_given(link, weights, name):
    ends, given = link(name), []

    def take(at, update):
        given.extend(at.receive(WeightUpdate(update.number, update.version - 1)))

    _, (taken,) = ends.update(take=take)
    with pytest.raises(TrainingFailed, match=r"from actor\[0\] on here to rollout\[1\] on there"):
        taken.result(SECONDS)
    assert given == []


@pytest.mark.parametrize("name", ACROSS)
def test_an_engine_that_is_asleep_holds_up_nobody(link, weights, monkeypatch, name):
    """It refuses before it has looked at the stream; the sender's time-out is ten minutes."""
    monkeypatch.setattr(bucketing, "BUCKET_BYTES", 1)

    def refuse(at, update):
        with closing_stream(at.receive(update)):
            raise RuntimeError("asleep")

    sent, (taken,) = link(name).update(take=refuse)
    with pytest.raises(RuntimeError, match="asleep"):
        taken.result(SECONDS)
    error = sent.exception(SECONDS)
    if name in ("tcp", "ipc"):  # the sender sees the connection end
        assert isinstance(error, TrainingFailed)
        assert "rollout[1] on there" in str(error)
    else:
        assert error is None


@pytest.mark.parametrize("name", ACROSS)
def test_weights_come_in_the_order_in_which_they_were_sent(link, name):
    """A sampler with an adapter of its own needs the adapter's configuration first."""
    sent = {"z": torch.zeros(3, dtype=torch.uint8), "a": torch.zeros(4), "m": torch.zeros(2).bfloat16()}
    _, (taken,) = link(name).update(sent.items())
    assert [found for found, _ in taken.result(SECONDS)] == ["z", "a", "m"]
