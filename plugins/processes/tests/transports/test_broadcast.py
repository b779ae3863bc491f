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
