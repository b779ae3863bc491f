"""Write data, tokenizer and config of a model that is made from nothing: ``python prepare.py OUT [--small]``.

::

    OUT/model/                config and tokenizer, no weights: the first run draws them
    OUT/data/pages.jsonl      text and arithmetic for pretraining
    OUT/data/worked.jsonl     2,000 worked solutions for SFT, half of which stop one step early
    OUT/data/train.jsonl      20,000 problems for GRPO
    OUT/data/heldout.jsonl    500 problems that no other file has

The model is a Qwen3 of 116 million parameters; ``--small`` makes one of 0.6 million and less data, for a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from problems import pages, problems

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LARGE = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 16, "num_attention_heads": 12}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def make_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> int:
    """Train a byte-level BPE whose digits are single tokens, with a chat template, and return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT,
    )
    fast.save_pretrained(folder)
    return len(fast)


def make_model(folder: Path, vocab_size: int, sizes: dict[str, int]) -> None:
    """Write the config of a Qwen3; the engine draws the weights of a folder that has none."""
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocab_size,
        num_key_value_heads=sizes["num_attention_heads"] // 2,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
        **sizes,
    ).save_pretrained(folder)


def prepare(out: Path, small: bool = False) -> None:
    """Write everything that the run files read."""
    (out / "data").mkdir(parents=True)
    known: set[str] = set()
    write(out / "data/heldout.jsonl", problems(100 if small else 500, 1, known))
    write(out / "data/worked.jsonl", problems(2000, 2, known, careless=0.5))
    write(out / "data/train.jsonl", problems(1000 if small else 20000, 3, known))
    write(
        out / "data/pages.jsonl",
        ({"prompt": "", "response": text} for text in pages(4000 if small else 260000, 4, known)),
    )
    sizes, vocabulary = (SMALL, 512) if small else (LARGE, 8192)
    learned_from = [
        *pages(2000 if small else 20000, 5, known),
        *(row["prompt"] + row["response"] for row in problems(2000, 6, set())),
    ]
    make_model(out / "model", make_tokenizer(out / "model", learned_from, vocabulary), sizes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="a model of 0.6 million parameters, for a CPU")
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.small)
