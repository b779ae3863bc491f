"""What ranks tell each other: in a group of one process, and with the others' words put into its mouth."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from engine_core.errors import DataError, EnvironmentProblem
from engine_plugin_torch.rank_group import RankGroup, join

CPU = torch.device("cpu")


@pytest.fixture
def one():
    assert not dist.is_initialized()
    group = RankGroup(0, 1, CPU)
    yield group
    group.close()
    assert not dist.is_initialized()


def test_one_process_has_a_group_of_its_own_and_agrees_with_itself(one):
    assert one.total(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    assert one.total(torch.tensor(0.1, dtype=torch.float64)).dtype == torch.float64
    assert one.most(3) == 3
    assert one.texts({"names": ["ä", None]}) == [{"names": ["ä", None]}]
    assert one.described == {"ranks": 1, "ranks_per_slice": 1}


def test_its_group_goes_with_the_last_engine_that_uses_it(one):
    other = RankGroup(0, 1, CPU)
    other.close()
    other.close()
    assert dist.is_initialized()
    assert one.most(2) == 2


def test_a_group_that_another_library_destroyed_is_not_destroyed_twice():
    group = RankGroup(0, 1, CPU)
    dist.destroy_process_group()  # vLLM does so when it shuts down
    group.close()
    again = RankGroup(0, 1, CPU)
    assert again.most(3) == 3
    again.close()


def test_ranks_that_nobody_joined_are_refused(one):
    with pytest.raises(EnvironmentProblem, match="There should be 2 ranks, and they have not been joined"):
        join(2, CPU)


def test_a_rank_learns_of_anothers_error_and_raises_its_own(one, monkeypatch):
    one.share(None, "Reading")
    with pytest.raises(KeyError, match="mine"):
        one.share(KeyError("mine"), "Reading")
    monkeypatch.setattr(one, "texts", lambda mine: [mine, "OSError: no file"])
    with pytest.raises(DataError, match="Reading failed on rank 1: OSError: no file"):
        one.share(None, "Reading", DataError)
