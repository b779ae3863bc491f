"""Contracts of an advantage estimator: its values, and what every estimator leaves at 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_plugin_testing.contracts import close, contract

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch
    from engine_plugin_testing.algorithm_bench import AdvantageBench

GROUPS = [[0.0, 1.0, 0.5, 1.0], [2.0, -1.0, 0.0, 0.25], [1.0, 0.0, 0.0, 3.0]]
TOLERANCE = 1e-5


def _of_rollouts(batch: Batch, values: Tensor) -> Tensor:
    """Return the advantages of the sampled tokens: [B, tokens of a response]."""
    return values[batch["loss_mask"]].reshape(len(batch), -1)


@contract(catches=("advantages of the wrong sign",))
def values_are_right(bench: AdvantageBench) -> None:
    """Each example's groups of rewards get the advantages that the example gives."""
    for groups, expected in bench.examples:
        batch = bench.batch(groups)
        found = _of_rollouts(batch, bench.advantages(batch))
        wanted = torch.tensor([value for group in expected for value in group], dtype=torch.float64)
        wanted = wanted if wanted.ndim == 2 else wanted[:, None].expand_as(found)
        close(found, wanted, TOLERANCE, f"Advantages of {groups}")


@contract(catches=("advantages of prompt tokens",))
def tokens_outside_the_mask_get_0(bench: AdvantageBench) -> None:
    """A token that the policy did not sample has the advantage 0."""
    batch = bench.batch(GROUPS)
    outside = bench.advantages(batch)[~batch["loss_mask"]]
    close(outside, torch.zeros_like(outside), 0.0, "Advantages outside of the loss mask")


@contract(catches=("invalid rollouts in the statistics",))
def invalid_rollouts_do_not_count(bench: AdvantageBench) -> None:
    """The reward of an invalid rollout does not change the advantages of others.

    The advantage of the invalid rollout is 0.
    """
    batch = bench.batch(GROUPS)
    valid = torch.tensor([index not in (1, 6) for index in range(len(batch))])
    batch = batch.with_columns(sequences={"valid": valid})
    first = bench.advantages(batch)
    other = {
        name: torch.where(valid, batch[name], 50.0) for name in ("rewards", "reward/kit", "reward_term/kit")
    }
    second = bench.advantages(batch.with_columns(sequences=other))
    close(second, first, TOLERANCE, "Advantages after a change of the rewards of invalid rollouts")
    invalid = _of_rollouts(batch, first)[~valid]
    close(invalid, torch.zeros_like(invalid), 0.0, "Advantages of invalid rollouts")


@contract(catches=("groups assumed to be in order",))
def order_does_not_matter(bench: AdvantageBench) -> None:
    """The order of the rollouts does not change their advantages.

    The ids of groups may be any numbers.
    """
    batch = bench.batch(GROUPS)
    first = _of_rollouts(batch, bench.advantages(batch))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3)).tolist()
    mixed = batch.select(order)
    mixed = mixed.with_columns(sequences={"group_ids": 7 * mixed["group_ids"] + 3})
    found = _of_rollouts(mixed, bench.advantages(mixed))
    close(found, first[order], TOLERANCE, "Advantages of the rollouts in another order")


@contract(catches=("a division by a spread of 0",))
def degenerate_groups_are_finite(bench: AdvantageBench) -> None:
    """Advantages are finite for equal rewards, groups of one, and very large or small rewards."""
    for groups in ([[1.0] * 4, [0.0] * 4], [[1.0], [0.0, 2.0]], [[1e6, -1e6], [1e-6, 0.0]], [[0.3]]):
        found = bench.advantages(bench.batch(groups))
        assert bool(found.isfinite().all()), f"Groups of rewards {groups} give {found.tolist()}."


@contract(catches=("the batch changed in place",))
def the_batch_is_left_alone(bench: AdvantageBench) -> None:
    """The estimator changes no column of the batch.

    It draws no random numbers, and called again it gives the same values.
    """
    batch = bench.batch(GROUPS)
    before = {name: value.clone() for name, value in {**batch.tokens, **batch.sequences}.items()}
    state = torch.get_rng_state()
    first = bench.advantages(batch)
    assert torch.equal(torch.get_rng_state(), state), "It draws from torch's global generator."
    for name, value in before.items():
        assert torch.equal(batch[name], value), f"It changes the column '{name}'."
    close(bench.advantages(batch), first, 0.0, "Called again")


@contract(catches=("a statistic of the batch declared as one of the group",))
def a_group_declared_apart_needs_no_other(bench: AdvantageBench) -> None:
    """The advantages of a group alone are those within its batch, if the spec declares ``per_group``."""
    if not bench.spec().per_group:
        return
    batch = bench.batch(GROUPS)
    whole, ids = _of_rollouts(batch, bench.advantages(batch)), batch["group_ids"]
    for group in ids.unique():
        chosen = (ids == group).nonzero().flatten()
        part = batch.select(chosen)
        close(
            _of_rollouts(part, bench.advantages(part)),
            whole[chosen],
            TOLERANCE,
            "Advantages of a group alone",
        )
