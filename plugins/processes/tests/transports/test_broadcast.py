"""What is particular to a group: it is none of torch's own, and of no use once it has failed."""

import pytest
import torch.distributed as dist

from engine_core.contracts.weight_transport import WeightUpdate
from engine_core.errors import TrainingFailed


def test_the_group_is_none_of_the_pool(link):
    ends = link("broadcast", receivers=2)
    assert not dist.is_initialized()
    assert [end.group.size() for end in ends.ends] == [3, 3, 3]


def test_a_group_that_has_failed_is_not_used_again(link):
    (_, receiver) = link("broadcast", timeout_seconds=0.2).ends
    with pytest.raises(TrainingFailed, match="nothing went on"):
        list(receiver.receive(WeightUpdate(1, 0)))
    with pytest.raises(TrainingFailed, match="has failed before"):
        list(receiver.receive(WeightUpdate(2, 0)))


class Carries:
    """A group of bytes as far as its first word."""

    aborted = False

    def broadcast(self, tensor, root):
        return self

    def is_completed(self):
        return True

    def abort(self):
        self.aborted = True


def test_bytes_go_between_gpus_where_every_end_has_tried_it(link):
    ends = link("broadcast", receivers=2)
    groups = [Carries() for _ in ends.ends]
    tried = [
        ends.pool.submit(end._tried, lambda made=made: made)
        for end, made in zip(ends.ends, groups, strict=True)
    ]
    assert [each.result(30) for each in tried] == [(made, "") for made in groups]


def test_where_one_end_cannot_none_does_and_updates_go_through_host_memory(link, weights):
    ends = link("broadcast", receivers=2)
    groups = [Carries() for _ in ends.ends]

    def fails():
        raise RuntimeError("NCCL error: no device\nand more")

    makers = [lambda: groups[0], fails, lambda: groups[2]]
    tried = [ends.pool.submit(end._tried, made) for end, made in zip(ends.ends, makers, strict=True)]
    assert [each.result(30) for each in tried] == [(None, ""), (None, "NCCL error: no device"), (None, "")]
    assert [made.aborted for made in groups] == [True, False, True]
    sent, taken = ends.update()
    assert sent.result(30) > 0
    assert [len(each.result(30)) for each in taken] == [4, 4]


def test_a_first_word_that_does_not_come_is_not_waited_for_longer_than_the_others_wait(link):
    ends = link("broadcast", timeout_seconds=1.0)
    hung = Carries()
    hung.is_completed = lambda: False
    tried = [
        ends.pool.submit(end._tried, lambda made=made: made)
        for end, made in zip(ends.ends, (Carries(), hung), strict=True)
    ]
    assert [each.result(30) for each in tried] == [(None, ""), (None, "nothing came within 0.5 s")]
