"""A contract of random completions: the value of one follows from it and its row alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from engine_plugin_testing.contracts import contract
from engine_plugin_testing.reward_cases import STRANGE, affordable, same, scored

if TYPE_CHECKING:
    from engine_plugin_testing.reward_bench import RewardBench, Sample

SEED, MOST = 1, 60
ENDS = ("stop", "length", "abort")


def random_units(bench: RewardBench, draws: random.Random, most: int = MOST) -> list[list[Sample]]:
    """Draw groups of examples with other responses: of pieces, or differing little from one before."""
    given = [str(sample["completion"]) for sample in bench.samples()[0] if "completion" in sample]
    pieces = [*given, *(word for text in given for word in text.split()), *STRANGE, " ", "7"]
    found: list[list[Sample]] = []
    old = ""
    for _ in range(affordable(bench, most)):
        found.append([])
        for row in draws.choice(bench.examples)[0]:
            text = "".join(draws.choices(pieces, k=draws.randint(0, 4))) * draws.choice((1, 1, 1, 200))
            text = draws.choice([text, old, *given[:1], *draws.sample(given, len(given))[:2]])
            old = draws.choice((text, text, f" {text}", f"{text}\n", text.swapcase(), text[1:], text[::-1]))
            length, reason = draws.randrange(40), draws.choice(ENDS)
            found[-1].append(
                {**row, "completion": old, "completion_ids": [7] * length, "finish_reason": reason}
            )
    return found


@contract(
    catches=(
        "texts that differ little taken for one",
        "the number of another text where there is none",
        "the values of a batch in the order of lengths",
    )
)
def random_completions_are_scored_apart(bench: RewardBench) -> None:
    """A random response gets the same value alone and in any batch, in any order, repeated, and from another process.

    Responses are of any length and script, and many differ by a letter or a space. Groups stay together.
    """
    draws = random.Random(SEED)
    units = random_units(bench, draws)
    alone = [batch[0] for batch in scored(bench, [[unit] for unit in units], workers=1)]
    for workers in (0, 1):
        order = [*draws.sample(range(len(units)), len(units)), *draws.choices(range(len(units)), k=20)]
        parts = []
        while order:
            size = draws.choice((1, 2, 5, 30))
            parts.append(order[:size])
            order = order[size:]
        found = scored(bench, [[units[at] for at in part] for part in parts], workers)
        for part, batch in zip(parts, found, strict=True):
            for at, values in zip(part, batch, strict=True):
                what = f"Seed {SEED}, response {at} ({str(units[at])[:200]}) in a batch of {len(part)}"
                same(values, alone[at], f"{what}, workers = {workers}, against alone")
