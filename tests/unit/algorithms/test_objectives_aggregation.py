import pytest
import torch

from engine_core.algorithms.objectives import normalizer, with_weights
from engine_core.types import Batch

LENGTHS = [4, 3, 2]
MASK = [0, 1, 1, 1, 0, 0, 1, 0, 0]  # 3, 1 and 0 loss tokens: T = 4, B = 2
LOSS = [9.0, 1.0, 2.0, 3.0, 9.0, 9.0, 10.0, 9.0, 9.0]


def batch():
    return Batch(
        token_ids=torch.zeros(9, dtype=torch.int64),
        lengths=torch.tensor(LENGTHS),
        tokens={"loss_mask": torch.tensor(MASK, dtype=torch.bool)},
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / (2 * 5)),
    ],
)
def test_each_mode_is_its_formula(mode, expected):
    weights = with_weights(batch(), mode, length_norm=5)["weights"]
    assert (weights * torch.tensor(LOSS)).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
)
def test_parts_with_a_unit_have_the_weights_of_the_whole_once_they_are_scaled(mode):
    parts = [with_weights(batch().select(rows), mode, 5, 8.0)["weights"] for rows in ([0], [1, 2])]
    expected = with_weights(batch(), mode, 5)["weights"]
    assert torch.allclose(8.0 / normalizer(mode, 4, 2) * torch.cat(parts), expected)


def test_token_share_sums_to_one_in_every_mode():
    assert with_weights(batch(), "token-sum")["token_share"].sum().item() == pytest.approx(1.0)


def test_weights_do_not_depend_on_how_the_batch_is_cut_afterwards():
    weighed = with_weights(batch(), "seq-mean-token-mean")
    parts = [weighed.select([i])["weights"] for i in (2, 0, 1)]
    assert torch.equal(torch.cat([parts[1], parts[2], parts[0]]), weighed["weights"])


def test_a_batch_without_loss_tokens_has_zero_weights():
    empty = batch().with_columns(tokens={"loss_mask": torch.zeros(9, dtype=torch.bool)})
    assert with_weights(empty, "seq-mean-token-mean")["weights"].tolist() == [0.0] * 9


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
)
@pytest.mark.parametrize("parts", [[[0], [1], [2]], [[2, 0], [1]], [[], [2], [1, 0]], [[2, 1, 0]]])
def test_the_sum_over_any_split_is_that_of_the_closed_form(mode, parts):
    loss = torch.tensor(LOSS)
    rows = [
        [loss for loss, bit in zip(LOSS[a:b], MASK[a:b], strict=True) if bit]
        for a, b in ((0, 4), (4, 7), (7, 9))
    ]
    filled = [row for row in rows if row]
    expected = {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "token-sum": sum(map(sum, rows)),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(filled),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in filled) / len(filled),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(filled) / 7,
    }[mode]
    whole = with_weights(batch(), mode, length_norm=7).with_columns(tokens={"loss": loss})
    total = sum(float((part["weights"] * part["loss"]).sum()) for part in map(whole.select, parts))
    assert total == pytest.approx(expected)


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="Unknown loss aggregation 'auto'"):
        with_weights(batch(), "auto")
