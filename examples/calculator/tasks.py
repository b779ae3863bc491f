"""Data, a tokenizer with a chat template, and a small random model.

    python examples/calculator/tasks.py FOLDER

The model is far too small to multiply. The warm start's pupil mostly guesses, sometimes asks the
calculator, and then sometimes miscopies a digit; what pays, reinforcement learning has to find out.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from engine_plugin_tools.demo.prepare import make_model

ROWS = {"sft": 8000, "train": 4000, "heldout": 200}
GUESSES = 0.4  # share of the pupil's rows that answer without asking
SLIP = 0.5  # of its questions to the calculator have a wrong digit
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
ROLES = ("user", "assistant", "tool")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def draw(rng: random.Random) -> tuple[str, str, int]:
    """Question, what to ask the calculator, answer."""
    a, b, word = rng.randint(10, 99), rng.randint(10, 99), rng.choice(list(SIGNS))
    answer = {"plus": a + b, "minus": a - b, "times": a * b}[word]
    return f"{a} {word} {b}?", f"{a}{SIGNS[word]}{b}", answer


def pupil(rng: random.Random, question: str, task: str, answer: int) -> list[dict[str, str]]:
    """A conversation as the warm start shows it."""
    turns = [{"role": "user", "content": question}]
    if rng.random() < GUESSES:
        return [*turns, {"role": "assistant", "content": str(rng.randint(-89, 9801))}]
    if rng.random() < SLIP:
        at = rng.choice([0, 1, 3, 4])
        task = task[:at] + str(rng.randint(1, 9)) + task[at + 1 :]
        answer = rng.randint(-89, 9801)
    called = {"role": "assistant", "content": f"<calc>{task}</calc>"}
    told = [{"role": "tool", "content": str(answer)}, {"role": "assistant", "content": str(answer)}]
    return [*turns, called, *told]


def make_data(folder: Path, seed: int) -> None:
    """``sft.jsonl`` with conversations, ``train.jsonl`` and ``heldout.jsonl`` with prompts and answers; no task twice."""
    rng = random.Random(seed)
    found = dict.fromkeys(draw(rng) for _ in range(4 * sum(ROWS.values())))
    tasks = iter(found)
    for name, count in ROWS.items():
        rows = []
        for question, task, answer in (next(tasks) for _ in range(count)):
            prompt = [{"role": "user", "content": question}]
            shown = {"messages": pupil(rng, question, task, answer)}
            rows.append(shown if name == "sft" else {"prompt": prompt, "answer": str(answer)})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(folder: Path) -> int:
    """One token for each byte, for each role and for both ends of a call; returns how many."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<|end|>", *(f"<|{role}|>" for role in ROLES)]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(["<calc>", "</calc>", *(f" {word} " for word in SIGNS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def make(folder: Path, seed: int = 0) -> None:
    """Data, tokenizer and model below ``folder``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    make_data(folder / "data", seed)
    make_model(folder / "model", make_tokenizer(folder / "model"))


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-calculator"))
