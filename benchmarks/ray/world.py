"""Models, data and settings of the runs that are compared."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

COIN = '''
import hashlib
from engine_core import hookimpl
from engine_core.specs import Reward

def coin(completion):
    """Random weights learn nothing: any reward that differs within a group."""
    return float(hashlib.blake2b(completion.encode()).digest()[0] % 2)

@hookimpl
def engine_rewards():
    return {"coin": Reward(load=coin)}
'''
PROMPT_TOKENS = 64
STEPS = 10_000  # more than are ever asked for


def sums(folder: Path, given: Any) -> dict[str, Any]:
    """A small random model on sums, on the CPU."""
    from engine_plugin_testing import reference

    wide = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden}
    reference.write_model(folder / "model", wide, 0, True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(16) for b in range(16)]
    _write_rows(folder, rows)
    return _common(folder, given) | {"reward": [{"name": "numeric", "workers": 0}]}


def words(folder: Path, given: Any) -> dict[str, Any]:
    """A random model of a published shape on random words: FSDP over the ranks, the sampler in the same processes."""
    vocabulary = _write_shape(given.shape, folder / "model")
    rng = random.Random(0)
    rows = [
        {"prompt": " ".join(f"t{rng.randrange(2, vocabulary)}" for _ in range(PROMPT_TOKENS))}
        for _ in range(256)
    ]
    _write_rows(folder, rows)
    (folder / "coin.py").write_text(COIN)
    sampler: dict[str, Any] = {"rollout.hf.dtype": "bf16"}
    if given.sampler == "vllm":
        sampler = {
            "rollout.vllm.max_model_len": PROMPT_TOKENS + given.response,
            "rollout.vllm.gpu_memory_utilization": 0.2,
            "rollout.vllm.enforce_eager": True,
            "rollout.vllm.sleep_level": 0,
            "rollout.vllm.dtype": "bfloat16",
        }
    return (
        _common(folder, given)
        | sampler
        | {
            "plugins": [str(folder / "coin.py")],
            "reward": [{"name": "coin", "workers": 0}],
            "actor.backend": "fsdp",
            "actor.fsdp.param_dtype": "bf16",
            "actor.fsdp.probe": False,
            "actor.max_tokens_per_rank": 16384,
            "rollout.backend": given.sampler,
            "data.max_prompt_tokens": PROMPT_TOKENS,
        }
    )


def of_runtime(config: dict[str, Any], given: Any, backend: str) -> dict[str, Any]:
    """The same settings under one runtime."""
    chosen: dict[str, Any] = {"runtime.backend": backend}
    if given.split:
        chosen |= {
            "placement.pools": {"train": 1, "serve": 1},
            "placement.actor": "train",
            "placement.rollout": "serve",
        }
    if given.device == "cuda":
        chosen[f"runtime.{backend}.processes"] = given.processes
    return {**config, **chosen}


def _common(folder: Path, given: Any) -> dict[str, Any]:
    return {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "data.prompts_per_step": given.prompts,
        "rollout.group_size": 8,
        "rollout.max_response_tokens": given.response,
        "run.dir": str(folder / "runs"),
        "run.steps": STEPS,
        "checkpoint.at_end": False,
        "tracking.trackers": [],
    }


def _write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_shape(name: str, folder: Path) -> int:
    """A folder with random bf16 weights and a tokenizer of ``t2 t3 ...``; returns the words that it has."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from engine_plugin_tools.bench.shapes import SHAPES

    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = AutoConfig.for_model(**SHAPES[name] | ends)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # this process only starts others
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, config.vocab_size)}
    made = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(prefix="##")
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    return int(config.vocab_size)
