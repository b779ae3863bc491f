"""Text for pretraining, and word problems with worked solutions: all drawn from seeds, nothing is downloaded.

Mia has 38 marbles. She buys 4 boxes of 12 marbles, then gives 25 to Tom. How many marbles does Mia have now?
4 * 12 = 48. 38 + 48 = 86. 86 - 25 = 61. The answer is \\boxed{61}.

A careless solution stops one step early:
4 * 12 = 48. 38 + 48 = 86. The answer is \\boxed{86}.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

PEOPLE = {
    "Mia": "She",
    "Tom": "He",
    "Ana": "She",
    "Ben": "He",
    "Zoe": "She",
    "Leo": "He",
    "Eva": "She",
    "Max": "He",
}
THINGS = ("apples", "marbles", "books", "coins", "shells", "cards", "pens", "stamps", "stones", "tickets")
PLACES = ("market", "school", "harbour", "library", "park", "station")


def problem(draw: random.Random, careless: float = 0.0) -> dict[str, str]:
    """Return a question of one or two steps, a worked solution and the right answer.

    Args:
        draw: generator of random numbers.
        careless: probability that the solution stops one step early.
    """
    name, other = draw.sample(list(PEOPLE), 2)
    thing = draw.choice(THINGS)
    total = draw.randint(5, 60)
    totals, clauses, working = [total], [], []
    for _ in range(draw.randint(1, 2)):
        kind = draw.choice(("gain", "loss", "boxes", "half", "double"))
        if kind == "gain" or total == 1:
            n = draw.randint(2, 60)
            clauses.append(draw.choice((f"finds {n} more", f"buys {n} more", f"gets {n} from {other}")))
            working.append(f"{total} + {n} = {total + n}.")
            total += n
        elif kind == "boxes":
            boxes, each = draw.randint(2, 9), draw.randint(2, 12)
            clauses.append(f"buys {boxes} boxes of {each} {thing}")
            working.append(
                f"{boxes} * {each} = {boxes * each}. {total} + {boxes * each} = {total + boxes * each}."
            )
            total += boxes * each
        elif kind == "half" and total % 2 == 0 and total > 2:
            clauses.append(f"gives half of them to {other}")
            working.append(f"{total} / 2 = {total // 2}.")
            total //= 2
        elif kind == "double" and total < 200:
            clauses.append(f"doubles them at the {draw.choice(PLACES)}")
            working.append(f"{total} * 2 = {total * 2}.")
            total *= 2
        else:
            n = draw.randint(1, min(total - 1, 60))
            clauses.append(draw.choice((f"loses {n}", f"sells {n}", f"gives {n} to {other}")))
            working.append(f"{total} - {n} = {total - n}.")
            total -= n
        totals.append(total)
    question = (
        f"{name} has {totals[0]} {thing}. {PEOPLE[name]} {', then '.join(clauses)}. "
        f"How many {thing} does {name} have now?"
    )
    steps = len(working) - (draw.random() < careless)
    solution = " ".join([*working[:steps], f"The answer is \\boxed{{{totals[steps]}}}."])
    return {"prompt": question, "response": solution, "answer": str(total)}


def problems(count: int, seed: int, known: set[str], careless: float = 0.0) -> list[dict[str, str]]:
    """Return different problems whose questions are not in ``known``, and add their questions to it."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        row = problem(draw, careless)
        if row["prompt"] not in known:
            known.add(row["prompt"])
            found.append(row)
    return found


def tales(draw: random.Random, known: set[str]) -> str:
    """Return up to four problems that are not in ``known``, with their solutions, as text without a chat's form."""
    drawn = [problem(draw) for _ in range(4)]
    rows = [row for row in drawn if row["prompt"] not in known]
    return " ".join(f"{row['prompt']} {row['response'].split(' The answer')[0]}" for row in rows)


def sums(draw: random.Random) -> str:
    """Return a page of sums, differences, products and halves."""
    lines = []
    for _ in range(24):
        a, b = draw.randint(1, 400), draw.randint(1, 120)
        c, d = draw.randint(2, 12), draw.randint(2, 12)
        lines.append(
            draw.choice(
                (
                    f"{a} + {b} = {a + b}.",
                    f"{a + b} - {b} = {a}.",
                    f"{c} * {d} = {c * d}.",
                    f"{a * 2} / 2 = {a}.",
                )
            )
        )
    return " ".join(lines)


def story(draw: random.Random) -> str:
    """Return a few sentences about people, places and things, without a question."""
    sentences = []
    for _ in range(8):
        name, other = draw.sample(list(PEOPLE), 2)
        thing, place, n = draw.choice(THINGS), draw.choice(PLACES), draw.randint(2, 90)
        sentences.append(
            draw.choice(
                (
                    f"{name} goes to the {place} with {other}.",
                    f"{PEOPLE[name]} sees {n} {thing} at the {place}.",
                    f"{name} has {n} {thing} and gives some to {other}.",
                    f"At the {place}, {other} sells {thing} to {name}.",
                    f"{name} counts the {thing}: {n - 1}, {n}, {n + 1}.",
                )
            )
        )
    return " ".join(sentences)


@cache
def english() -> tuple[str, ...]:
    """Return the docstrings of Python's standard library, the English text that every machine has."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, ValueError):  # some files are samples of broken code
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > 80:
                    texts.append(text[:2000])
    return tuple(texts)


def pages(count: int, seed: int, known: set[str]) -> Iterator[str]:
    """Yield ``count`` texts to pretrain on: a tenth English, the others sums, stories and worked problems in equal parts.

    Args:
        count: number of texts.
        seed: of what is drawn.
        known: questions of other files, which no text has.
    """
    draw, texts = random.Random(seed), english()
    for _ in range(count):
        kind = draw.choice((sums, story, partial(tales, known=known)))
        yield draw.choice(texts) if draw.random() < 0.1 else kind(draw)
