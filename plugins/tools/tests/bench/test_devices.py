"""Floors by data sheets, against figures worked out by hand for one H200."""

from __future__ import annotations

import pytest

from engine_plugin_tools.bench.devices import DEVICES, Device, decode_floor, device_of, train_floor
from engine_plugin_tools.bench.shapes import SHAPES, Cost

H200 = DEVICES["H200"]


@pytest.mark.parametrize(
    ("shape", "sequences", "context", "expected"),
    [
        ("qwen3-0.6b", 1, 512, 3.9e3),
        ("qwen3-0.6b", 128, 512, 70.6e3),
        ("qwen3-0.6b", 512, 1024, 40.1e3),
        ("qwen3-1.7b", 256, 512, 67e3),
        ("qwen3-4b", 512, 512, 52.6e3),
        ("qwen3-8b", 128, 512, 24.8e3),
    ],
)
def test_sampling_is_bound_by_reading_weights_and_what_came_before(shape, sequences, context, expected):
    """Tokens a second of one step at this context: weights once, 2 L n_kv d numbers a token, at 4.8 TB/s."""
    floor = decode_floor(Cost.of(SHAPES[shape]), H200, sequences, context, 1)
    assert sequences / floor == pytest.approx(expected, rel=0.02)


def test_a_response_reads_more_with_each_token():
    """512 x (256 + 256) tokens of Qwen3-0.6B: 1.26 s."""
    assert decode_floor(Cost.of(SHAPES["qwen3-0.6b"]), H200, 512, 256, 256) == pytest.approx(1.26, rel=0.02)
    cost = Cost(0, 0, 0, keys_values=1, weights=0)
    assert decode_floor(cost, Device(1, 1), 2, 10, 3, itemsize=1) == 2 * (10 + 11 + 12)


def test_devices_share_the_sequences_and_each_reads_the_weights():
    cost = Cost(body=60, head=40, attention=0, keys_values=1, weights=200)
    assert decode_floor(cost, Device(1, 1), 4, 10, 1, ranks=2, itemsize=1) == 100 + 2 * 10


@pytest.mark.parametrize(
    ("shape", "expected"), [("qwen3-0.6b", 258e3), ("qwen3-4b", 40e3), ("qwen3-8b", 21e3)]
)
def test_training_is_bound_by_arithmetic(shape, expected):
    """Tokens a second at 989 TFLOP/s, sequences of 768; without the update."""
    cost, lengths = Cost.of(SHAPES[shape]), [768] * 10_000
    assert sum(lengths) / train_floor(cost, H200, lengths, sum(lengths)) == pytest.approx(expected, rel=0.03)


def test_the_update_reads_and_writes_28_bytes_a_weight():
    """Qwen3-0.6B: 3.5 ms."""
    assert train_floor(Cost.of(SHAPES["qwen3-0.6b"]), H200, [], 0) == pytest.approx(3.5e-3, rel=0.01)
    assert train_floor(Cost.of(SHAPES["qwen3-0.6b"]), H200, [], 0, itemsize=2, ranks=2) == pytest.approx(
        0.87e-3, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    ],
)
def test_a_device_is_known_by_its_name(name, expected):
    assert device_of(name) is DEVICES[expected]


def test_nobody_guesses_the_floor_of_an_unknown_device():
    assert device_of("cpu") is None
    assert device_of("AMD Instinct MI300X") is None
