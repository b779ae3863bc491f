"""Sharded tensors as files: what is put together from them, and what is refused."""

from __future__ import annotations

import pytest
import torch

from engine_core.errors import DataError
from engine_core.runs import state_files
from engine_plugin_torch.shards import Shards, optimizer_tensors, own_parts, shard_file, write_parts

WHOLE = torch.arange(20.0).view(5, 4)


@pytest.fixture
def two_ranks(tmp_path):
    """Three rows of the first rank, two of the second, and a number that the first has."""
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        held = {"w": WHOLE[rows].contiguous(), **({"step": torch.tensor(7.0)} if rank == 0 else {})}
        places = {"w": {"shape": [5, 4], "at": [rows.start, 0]}, "step": {"shape": [], "at": []}}
        write_parts(tmp_path / shard_file("weights", rank, 2), held, places)
    return tmp_path


def test_any_part_is_put_together_from_the_files_that_hold_some_of_it(two_ranks):
    shards = Shards(two_ranks, "weights")
    assert torch.equal(shards.whole("w"), WHOLE)
    assert torch.equal(shards.read("w", (slice(2, 4), slice(1, 3))), WHOLE[2:4, 1:3])
    assert float(shards.whole("step")) == 7.0


def test_files_of_one_process_hold_whole_tensors(tmp_path):
    state_files.save_tensors(tmp_path / "weights.safetensors", {"w": WHOLE})
    assert torch.equal(Shards(tmp_path, "weights").read("w", (slice(1, 2), slice(0, 4))), WHOLE[1:2])


def test_of_plain_tensors_the_first_rank_writes_copies(tmp_path):
    tensor = WHOLE.clone()
    held, places = own_parts({"w": tensor}, 0)
    tensor.zero_()
    assert torch.equal(held["w"], WHOLE)
    assert places == {"w": {"shape": [5, 4], "at": [0, 0]}}
    assert own_parts({"w": tensor}, 1) == ({}, {})


def test_a_checkpoint_that_lacks_a_file_or_a_part_is_refused(two_ranks):
    second = two_ranks / shard_file("weights", 1, 2)
    second.rename(two_ranks / "aside")
    with pytest.raises(DataError, match=r"lacks weights-00001-of-00002\.safetensors"):
        Shards(two_ranks, "weights")
    places = {"w": {"shape": [5, 4], "at": [3, 0]}}
    write_parts(second, {"w": WHOLE[3:4].contiguous()}, places)
    with pytest.raises(DataError, match="holds 16 of 20 values of 'w'"):
        Shards(two_ranks, "weights")
    with pytest.raises(DataError, match=r"optimizer\.safetensors is missing"):
        Shards(two_ranks, "optimizer")


def test_tensors_of_other_names_or_shapes_are_left_alone(two_ranks):
    shards, target = Shards(two_ranks, "weights"), torch.zeros(5, 4)
    for tensors, problem in [
        ({"w": target}, "Unknown weight 'step' for the model"),
        ({"w": target, "step": torch.zeros(()), "v": target}, "has no weight 'v' of the model"),
        ({"w": torch.zeros(4, 5), "step": torch.zeros(())}, r"has shape \[5, 4\] in .*; expected \[4, 5\]"),
    ]:
        with pytest.raises(DataError, match=problem):
            shards.fill(tensors, "the model")
    assert not target.any()
    shards.fill({"w": target, "step": torch.zeros(())}, "the model")
    assert torch.equal(target, WHOLE)


def test_state_of_an_optimizer_is_whole_where_its_weight_is(two_ranks):
    found = optimizer_tensors(Shards(two_ranks, "weights"), {"w": torch.zeros(5, 4)})
    assert torch.equal(found["w"], WHOLE)


def test_a_file_that_is_none_of_tensors_is_named(tmp_path):
    (tmp_path / "weights.safetensors").write_text("no tensors")
    with pytest.raises(DataError, match=r"weights\.safetensors is no file of sharded tensors"):
        Shards(tmp_path, "weights")
