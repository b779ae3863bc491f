"""What a bandwidth of a collective is. That ranks measure it is tested with the engine that spreads models."""

from __future__ import annotations

import pytest

from engine_plugin_torch.collectives import bus_factor, measure


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1),
    ],
)
def test_the_busiest_link_carries_what_nccl_tests_say(name, expected):
    assert bus_factor(name, 8) == expected


def test_two_ranks_send_as_much_as_they_have():
    assert bus_factor("all_reduce", 2) == 1.0


def test_without_groups_there_is_nothing_to_measure(make_engine):
    engine = make_engine()
    assert engine.measure_collectives([1024], 1) == []
    assert measure({}, engine.device, [1024], 1) == []
