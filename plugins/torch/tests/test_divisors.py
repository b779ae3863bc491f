"""What is proposed where a number of ranks does not divide another."""

from __future__ import annotations

from engine_plugin_torch.divisors import divisors, nearest_fit


def test_divisors_are_all_that_divide():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_the_nearest_that_fits_is_proposed_of_two_the_smaller():
    assert nearest_fit(5, divisors(12)) == "Set it to 4 (one of 1, 2, 3, 4, 6, 12)."
    assert nearest_fit(9, [8]) == "Set it to 8."
