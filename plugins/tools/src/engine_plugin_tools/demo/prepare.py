"""The data, tokenizer and model of ``engine demo``."""

from __future__ import annotations

import json
import random
from pathlib import Path

from engine_plugin_tools.demo.problems import Problem, draw, draw_many

ROWS = {"sft": 12000, "train": 6000, "heldout": 400}
PAIRS = {"pairs": 2000, "pairs_heldout": 200}
SLIP = 0.6  # of the steps in the warm start's solutions count one too many


def write_rows(path: Path, problems: list[Problem]) -> None:
    """Write JSONL with the columns ``prompt``, ``response`` and ``answer``."""
    rows = [{"prompt": p.question + "\n", "response": p.solution, "answer": str(p.answer)} for p in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_data(folder: Path, seed: int = 0) -> list[Problem]:
    """Write the three files and return their problems; no question is in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[Problem] = []
    for number, (name, count) in enumerate(ROWS.items()):
        known = frozenset(problem.question for problem in problems)
        drawn = draw_many(count, 1000 * seed + number, known, SLIP if name == "sft" else 0.0)
        write_rows(folder / f"{name}.jsonl", drawn)
        problems += drawn
    return problems


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return rows for DPO, whose solutions differ in every sum: both are drawn from one state of the generator."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        state = rng.getstate()
        wrong = draw(rng, slip=1.0)
        rng.setstate(state)
        right = draw(rng, slip=0.0)
        rows.append({"prompt": right.question + "\n", "chosen": right.solution, "rejected": wrong.solution})
    return rows


def make_pairs(folder: Path) -> None:
    """Write ``pairs.jsonl`` and ``pairs_heldout.jsonl`` with the columns ``prompt``, ``chosen``, ``rejected``."""
    for seed, (name, count) in enumerate(PAIRS.items(), 7):
        lines = [json.dumps(row) + "\n" for row in pairs(count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def make_tokenizer(folder: Path, problems: list[Problem], vocab_size: int = 384) -> int:
    """Train a byte-level BPE whose digits are single tokens, and return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{p.question}\n{p.solution}" for p in problems), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    return len(fast)


def make_model(folder: Path, vocab_size: int) -> None:
    """Write a Qwen3 config; the engine initializes a folder without weights at random."""
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    ).save_pretrained(folder)


def prepare(folder: Path, seed: int = 0) -> None:
    """Write ``data/{sft,train,heldout,pairs,pairs_heldout}.jsonl`` and ``model/``, a Qwen3 of half a million parameters without weights."""
    problems = make_data(folder / "data", seed)
    make_pairs(folder / "data")
    make_model(folder / "model", make_tokenizer(folder / "model", problems))
