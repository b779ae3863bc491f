"""Arithmetic word problems with worked answers: readable text, thousands of different rows.

    Mia has 7 marbles. She finds 5 more, then gives 3 to Tom. How many marbles does Mia have now?
    7 + 5 = 12, 12 - 3 = 9. Answer: 9

One or two operations, numbers of one or two digits, no negative results. A problem is drawn from a
seed; training and held-out files share no question.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = {
    "Mia": "She",
    "Tom": "He",
    "Ana": "She",
    "Ben": "He",
    "Zoe": "She",
    "Leo": "He",
    "Eva": "She",
    "Max": "He",
}
THINGS = ("apples", "marbles", "books", "coins", "shells", "cards", "pens", "stamps")
GAINS = ("finds {n} more", "buys {n} more", "gets {n} from {other}", "wins {n} more")
LOSSES = ("loses {n}", "sells {n}", "gives {n} to {other}", "breaks {n}")


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution and the number at its end."""

    question: str
    solution: str
    answer: int


def draw(rng: random.Random, largest: int = 9, slip: float = 0.0) -> Problem:
    """One problem with numbers up to ``largest`` and no negative results.

    Args:
        rng: where it comes from.
        largest: largest number in the question.
        slip: probability that a step of the worked solution counts one too many. ``answer`` is
            right all the same.
    """
    name, other = rng.sample(list(NAMES), 2)
    thing = rng.choice(THINGS)
    start = total = counted = rng.randint(2, largest)
    clauses, working = [], []
    for _ in range(rng.choice((1, 2))):
        gain = total == 0 or (rng.random() < 0.5 and total < largest)
        n = rng.randint(1, largest) if gain else rng.randint(1, min(total, largest))
        result = total + n if gain else total - n
        clauses.append(rng.choice(GAINS if gain else LOSSES).format(n=n, other=other))
        written = counted + n if gain else counted - n
        written += rng.random() < slip
        working.append(f"{counted} {'+' if gain else '-'} {n} = {written}")
        total, counted = result, written
    question = f"{name} has {start} {thing}. {NAMES[name]} {', then '.join(clauses)}. How many {thing} does {name} have now?"
    return Problem(question, f"{', '.join(working)}. Answer: {counted}", total)


def draw_many(
    count: int, seed: int, exclude: frozenset[str] = frozenset(), slip: float = 0.0
) -> list[Problem]:
    """``count`` different problems whose questions are not in ``exclude``."""
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw(rng, slip=slip)
        if problem.question not in exclude:
            found[problem.question] = problem
    return list(found.values())
