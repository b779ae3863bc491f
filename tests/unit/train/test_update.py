"""What a step's columns are looked at for before they are learned from."""

import pytest
import torch

from engine_core.train.update import all_finite


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([], True),
        ([3e38, 3e38], True),  # the sum is infinite, the values are not
        ([float("inf"), float("-inf")], False),
        ([float("inf"), 1.0], False),
        ([float("nan"), 1.0], False),
    ],
)
def test_a_column_is_finite_where_every_value_is(values, expected):
    assert all_finite(torch.tensor(values)) is expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_numbers_are_finite(dtype):
    assert all_finite(torch.tensor([1, 0, 1], dtype=dtype))
