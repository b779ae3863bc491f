"""Trials that tell a model which mixes the sequences of a pack from one that does not."""

from __future__ import annotations

import math

import pytest
import torch

from engine_plugin_torch.packed_forward import (
    ALIKE,
    FIRST,
    SECOND,
    differs_by,
    keeps_apart,
    probe_ids,
    probe_lengths,
)

VOCABULARY = 50


def sums(ids, lengths):
    """A causal model: the running sum of each sequence."""
    return torch.cat([part.float().cumsum(0) for part in ids.split(lengths)])[:, None]


def alone():
    return sums(probe_ids(VOCABULARY, torch.device("cpu"))[FIRST:], [SECOND])


def test_the_two_packs_differ_in_their_first_sequence_alone():
    first, other = (probe_ids(VOCABULARY, torch.device("cpu"), other) for other in (False, True))
    assert probe_lengths().tolist() == [FIRST, SECOND]
    assert torch.equal(first[FIRST:], other[FIRST:])
    assert (first[:FIRST] != other[:FIRST]).all()
    assert int(other.max()) < VOCABULARY


def test_a_model_that_keeps_sequences_apart_is_told_from_one_that_does_not():
    assert keeps_apart(lambda ids: sums(ids, [FIRST, SECOND]), alone(), VOCABULARY)
    assert not keeps_apart(lambda ids: sums(ids, [FIRST + SECOND]), alone(), VOCABULARY)


def test_a_pack_that_differs_as_kernels_do_passes_and_one_that_is_another_model_does_not():
    assert keeps_apart(lambda ids: 1.1 * sums(ids, [FIRST, SECOND]), alone(), VOCABULARY)
    assert not keeps_apart(lambda ids: 1.5 * sums(ids, [FIRST, SECOND]), alone(), VOCABULARY)


def test_rounding_by_a_scale_of_the_whole_pack_is_no_leak_where_it_is_expected_and_a_leak_stays_one():
    def rounded(ids):
        made = sums(ids, [FIRST, SECOND])
        step = ids[:FIRST].float().max() / 4  # the coarser, the larger what stands before
        return (made / step).round() * step

    assert not keeps_apart(rounded, alone(), VOCABULARY)
    assert keeps_apart(rounded, alone(), VOCABULARY, ALIKE)
    assert not keeps_apart(lambda ids: sums(ids, [FIRST + SECOND]), alone(), VOCABULARY, ALIKE)


def test_a_difference_is_a_share_of_what_is_expected_and_not_a_number_is_infinite():
    assert differs_by(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert differs_by(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    assert differs_by(torch.zeros(2), torch.zeros(2)) == 0.0
