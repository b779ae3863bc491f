"""Slices of joined parameters, beside what they are joined from by hand."""

import pytest
import torch

from engine_plugin_megatron.models.places import Joined, Source, attention_rows, boxes, whole_source


def rank_part(joined, tensors, size, rank):
    part = torch.zeros(joined.local_shape(size), dtype=torch.long)
    for piece in joined.pieces(size, rank):
        part[piece.here] = tensors[piece.name][piece.at]
    return part


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_queries_keys_and_values_of_a_group_stand_together(size):
    """4 heads of width 3, 2 groups: rows q0 q1 k0 v0 q2 q3 k1 v1 of 3 each; of 4 ranks each has half a group."""
    q, k, v = numbered(12, 5), 100 + numbered(6, 5), 200 + numbered(6, 5)
    joined = Joined("qkv", attention_rows(("q", "k", "v"), 4, 2, 3, (5,)))
    whole = torch.cat([q[:6], k[:3], v[:3], q[6:], k[3:], v[3:]])
    for rank, expected in enumerate(whole.chunk(size)):
        assert torch.equal(rank_part(joined, {"q": q, "k": k, "v": v}, size, rank), expected)


def test_a_bias_has_no_columns():
    q, k, v = numbered(8), 100 + numbered(4), 200 + numbered(4)
    joined = Joined("bias", attention_rows(("q", "k", "v"), 4, 2, 2, ()))
    found = rank_part(joined, {"q": q, "k": k, "v": v}, 2, 1)
    assert found.tolist() == [4, 5, 6, 7, 102, 103, 202, 203]


def test_each_rank_has_a_part_of_gate_and_of_up():
    gate, up = numbered(6, 2), 100 + numbered(6, 2)
    joined = Joined("fc1", ((Source("gate", (6, 2), 0, 6),), (Source("up", (6, 2), 0, 6),)))
    found = rank_part(joined, {"gate": gate, "up": up}, 2, 1)
    assert torch.equal(found, torch.cat([gate[3:], up[3:]]))


def test_a_row_parallel_weight_is_cut_along_its_columns():
    down = numbered(4, 6)
    joined = Joined("fc2", whole_source("down", (4, 6)), split=1)
    assert torch.equal(rank_part(joined, {"down": down}, 3, 2), down[:, 4:])


def test_a_weight_that_is_not_cut_is_whole_on_each_rank():
    joined = Joined("norm", whole_source("norm", (5,)), split=None)
    assert torch.equal(rank_part(joined, {"norm": numbered(5)}, 4, 3), numbered(5))


def test_rows_of_padding_are_nobodys():
    """5 rows and 3 of padding on 4 ranks: 2, 2, 1 and none."""
    joined = Joined("embedding", whole_source("embed", (5, 2)), padding=3)
    held = [[p.at[0].stop - p.at[0].start for p in joined.pieces(4, rank)] for rank in range(4)]
    assert held == [[2], [2], [1], []]
    assert joined.local_shape(4) == (2, 2)


def test_a_rank_holds_one_box_of_each_tensor():
    joined = Joined("qkv", attention_rows(("q", "k", "v"), 8, 4, 2, (3,)))
    found = boxes(joined.pieces(2, 1))
    assert {name: box[0] for name, (box, _) in found.items()} == {
        "q": slice(8, 16),
        "k": slice(4, 8),
        "v": slice(4, 8),
    }
    assert len(found["q"][1]) == 2  # one a group
