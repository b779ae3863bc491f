"""Data, a tokenizer, and a small random model.

    python examples/expressions/tasks.py FOLDER

A task is words such as ``twice a minus b squared``, an answer an expression of Python, ``2*a-b*b``. The warm start's pupil
makes a mistake in every second expression; which ones are right, reinforcement learning is told by tests alone.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from engine_plugin_tools.demo.prepare import make_model

SLIP = 0.5  # of the pupil's expressions have one wrong character
HELDOUT, COPIES = 100, 8  # tasks kept apart; rows of the warm start for each of the others
TESTS = 3  # for each task
WORDS = {"{}": "{}", "twice {}": "2*{}", "three times {}": "3*{}", "{} squared": "{0}*{0}"}
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
LETTERS = "ab0123456789+-*"


def terms() -> list[tuple[str, str]]:
    """(words, expression) of everything that can stand on one side."""
    named = [(words.format(x), code.format(x)) for x in "ab" for words, code in WORDS.items()]
    return [*named, *((str(n), str(n)) for n in range(1, 10))]


def tasks() -> list[tuple[str, str]]:
    """(words, expression) of every task in which a or b occurs."""
    found = [
        (f"{left} {word} {right}", f"{x}{sign}{y}")
        for left, x in terms()
        for word, sign in SIGNS.items()
        for right, y in terms()
    ]
    return [(words, code) for words, code in found if "a" in code or "b" in code]


def value(code: str, a: int, b: int) -> int:
    """What an expression of ``tasks`` is: sums of products, read from left to right."""
    total = 0
    for part in code.replace("-", "+-").split("+"):
        product = -1 if part.startswith("-") else 1
        for factor in part.removeprefix("-").split("*"):
            product *= {"a": a, "b": b}.get(factor) or int(factor)
        total += product
    return total


def tests(code: str, rng: random.Random) -> dict[str, object]:
    """Calls of ``f(a, b)`` and what they give, in the form of APPS."""
    inputs = [[rng.randint(2, 30), rng.randint(2, 30)] for _ in range(TESTS)]
    return {"fn_name": "f", "inputs": inputs, "outputs": [value(code, a, b) for a, b in inputs]}


def slipped(code: str, rng: random.Random) -> str:
    """An expression with one character changed."""
    at = rng.randrange(len(code))
    return code[:at] + rng.choice(LETTERS.replace(code[at], "")) + code[at + 1 :]


def make_data(folder: Path, seed: int) -> None:
    """``sft.jsonl`` with answers, ``train.jsonl`` and ``heldout.jsonl`` with tests; no task stands in both of these."""
    rng = random.Random(seed)
    drawn = tasks()
    rng.shuffle(drawn)
    shown = [pair for pair in drawn[HELDOUT:] for _ in range(COPIES)]
    rng.shuffle(shown)
    rows = {
        "sft": [
            {"prompt": f"{words}: ", "response": slipped(code, rng) if rng.random() < SLIP else code}
            for words, code in shown
        ],
        "train": [{"prompt": f"{words}: ", "tests": tests(code, rng)} for words, code in drawn[HELDOUT:]],
        "heldout": [{"prompt": f"{words}: ", "tests": tests(code, rng)} for words, code in drawn[:HELDOUT]],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def make_tokenizer(folder: Path) -> int:
    """One token for each byte and for each word; returns how many."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.add_tokens(["twice ", "three times ", " squared", *(f" {word} " for word in SIGNS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    return len(fast)


def make(folder: Path, seed: int = 0) -> None:
    """Data, tokenizer and model below ``folder``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    make_data(folder / "data", seed)
    make_model(folder / "model", make_tokenizer(folder / "model"))


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-expressions"))
