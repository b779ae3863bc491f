import dataclasses
import math

import pytest
import torch

from engine_core.types import Batch
from engine_plugin_trainers.algorithms.preference_columns import (
    log_ratios,
    mismatched,
    policy_weights,
    sides,
    tail_weights,
    with_shares,
)


def pairs(lengths=((2, 1), (1, 3)), prompt=1):
    """Pairs of responses of these lengths after prompts of one token; token ids count up."""
    counts = [prompt + n for pair in lengths for n in pair]
    mask = [k >= prompt for n in counts for k in range(n)]
    packed = Batch(
        token_ids=torch.arange(sum(counts)),
        lengths=torch.tensor(counts),
        tokens={"loss_mask": torch.tensor(mask)},
        sequences={"chosen": torch.tensor([True, False]).repeat(len(lengths))},
        keep_together=torch.arange(len(lengths)).repeat_interleave(2),
    )
    return with_shares(packed)


def test_shares_are_of_pairs_and_of_chosen_tokens():
    batch = pairs()
    assert batch["pair_share"].tolist() == [0.5] * 4
    assert batch["weights"].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 0, 0, 1 / 3, 0, 0, 0, 0])


def test_a_log_ratio_sums_the_response_and_no_other_token():
    batch = pairs(((2, 1),)).with_columns(tokens={"ref_log_probs": torch.tensor([9.0, -1, -1, 9, -3])})
    log_probs = torch.tensor([7.0, -0.5, -0.25, 7, -4.0], dtype=torch.float64)
    assert log_ratios(log_probs, batch).tolist() == [1.25, -1.0]
    assert log_ratios(log_probs, batch, normalise=True).tolist() == [0.625, -1.0]


def test_a_value_that_is_no_number_beside_the_response_does_not_count():
    batch = pairs(((1, 1),))
    log_probs = torch.tensor([float("nan"), -1.0, float("nan"), -2.0], requires_grad=True)
    ratio = log_ratios(log_probs, batch)
    ratio.sum().backward()
    assert ratio.tolist() == [-1.0, -2.0]
    assert log_probs.grad.tolist() == [0, 1, 0, 1]


def test_a_split_pair_is_refused():
    assert [side.tolist() for side in sides(pairs())] == [[0, 2], [1, 3]]
    for part in ([0, 3], [0, 1, 2], [0]):
        with pytest.raises(ValueError, match=r"^A pair was split"):
            sides(pairs().select(part))
    with pytest.raises(ValueError, match=r"^A pair was split"):
        sides(dataclasses.replace(pairs(), keep_together=None))


def test_each_prompt_gets_the_response_before_it():
    batch = Batch(
        token_ids=torch.tensor([10, 11, 12, 20, 21, 30, 31, 32, 33]),
        lengths=torch.tensor([3, 2, 4]),
        tokens={"loss_mask": torch.tensor([False, True, True, False, True, False, False, True, True])},
    )
    made = mismatched(batch, 4)
    assert made.token_ids.tolist() == [10, 32, 33, 20, 11, 12, 30, 31, 21]
    assert made.lengths.tolist() == [3, 3, 3]
    assert made["loss_mask"].tolist() == [False, True, True, False, True, True, False, False, True]
    cut = mismatched(batch, 2)
    assert cut.token_ids.tolist() == [10, 32, 20, 11, 30, 31]
    assert cut["loss_mask"].tolist() == [False, True, False, True, False, False]


def test_tokens_by_which_a_response_is_longer_count_less():
    batch = pairs(((3, 1), (1, 2), (2, 2)))
    weights = [w[mask].tolist() for w, mask in by_sequence(batch, tail_weights(batch, 0.25))]
    assert weights == [[1.0, 0.25, 0.25], [1.0], [1.0], [1.0, 0.25], [1.0, 1.0], [1.0, 1.0]]
    assert tail_weights(batch, 1.0).tolist() == [1.0] * batch.num_tokens


def by_sequence(batch, values):
    lengths = batch.lengths.tolist()
    return list(zip(values.split(lengths), batch["loss_mask"].split(lengths), strict=True))


def test_the_weights_of_tails_are_those_of_policy_and_reference():
    log_probs = torch.tensor([7.0, -0.5, -0.25, 7, -4.0], dtype=torch.float64)
    batch = pairs(((2, 1),)).with_columns(tokens={"ref_log_probs": torch.tensor([9.0, -1, -1, 9, -3])})
    batch = batch.with_columns(tokens={"tail_weights": tail_weights(batch, 0.5)})
    assert log_ratios(log_probs, batch).tolist() == [0.5 + 0.5 * 0.75, -1.0]
    assert log_ratios(batch["ref_log_probs"], batch).tolist() == [0.0, 0.0]  # at the reference a reward is 0


def test_observations_within_a_response_are_no_tokens_of_it():
    batch = pairs(((3, 2),))
    batch.tokens["loss_mask"][2] = False  # the second token of the chosen response
    assert tail_weights(batch, 0.5)[batch["loss_mask"]].tolist() == [1.0] * 4


def test_a_pair_weighs_as_much_as_the_policy_is_likely_to_say_it():
    batch = pairs(((2, 1), (1, 1)))
    p = torch.tensor([0.0, 0.5, 0.2, 0, 0.1, 0, 0.9, 0, 0.8], dtype=torch.float64)
    squares = torch.tensor([0.0, 0.4, 0.3, 0, 0.5, 0, 0.5, 0, 0.4], dtype=torch.float64)
    log_probs = p.log().requires_grad_()
    found = policy_weights(log_probs, squares, batch)
    expected = math.sqrt((0.5 / 0.4) * (0.2 / 0.3)) * (0.1 / 0.5)
    assert found.tolist() == [pytest.approx(expected), 1.0]  # 0.9 / 0.5 x 0.8 / 0.4 is over 1
    assert not found.requires_grad
