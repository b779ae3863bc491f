"""What is particular to a group: it is none of torch's own, and of no use once it has failed."""

import pytest
import torch.distributed as dist

from engine_core.errors import TrainingFailed
from engine_core.runtime.transports.base import Update


def test_the_group_is_none_of_the_pool(link):
    ends = link("broadcast", takers=2)
    assert not dist.is_initialized()
    assert [end.group.size() for end in ends.ends] == [3, 3, 3]


def test_a_group_that_has_failed_is_not_used_again(link):
    (_, taker) = link("broadcast", timeout_seconds=0.2).ends
    with pytest.raises(TrainingFailed, match="nothing went on"):
        list(taker.receive(Update(1, 0)))
    with pytest.raises(TrainingFailed, match="has failed before"):
        list(taker.receive(Update(2, 0)))
