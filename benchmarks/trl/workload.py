"""What both frameworks are given: one model folder, one file of prompts, one reward, one table of settings.

Imported by both virtual environments: needs torch, transformers and tokenizers, and neither framework.

The model is random (seed 0), so that nothing has to be fetched, and built so that its end token has a
probability below 1e-9: every response then has exactly ``response_tokens`` tokens in any framework,
and neither must be told to ignore the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[2] / ".cache" / "trl"  # what the benchmark makes: never under version control
END, PAD = "<eos>", "<pad>"  # ids 0 and 1
END_PROBABILITY = 1e-9  # of the end token, at most


@dataclass(frozen=True)
class Workload:
    """Sizes of the model and of a step."""

    model: dict[str, Any]  # of Qwen3Config
    prompts: int  # P, of a step
    group_size: int  # G
    prompt_tokens: int
    response_tokens: int
    micro_batch: int  # responses that go through the model at once in training, in the matched lane
    rows: int = 4096
    shared_channel: float = 0.3  # channel 0 of the embedding of all tokens but the end ...
    end_channel: float = -16.0  # ... and of the end: the deeper the model, the less of it is left at the head

    @property
    def responses(self) -> int:
        """B, of a step."""
        return self.prompts * self.group_size

    @property
    def micro_batch_tokens(self) -> int:
        """Of ``micro_batch`` responses with their prompts."""
        return self.micro_batch * (self.prompt_tokens + self.response_tokens)


def _qwen3(
    width: int, layers: int, heads: int, kv: int, dim: int, ff: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": dim, "intermediate_size": ff, "vocab_size": vocabulary,
        "max_position_embeddings": 2048, "rope_theta": 1e6,
    }  # fmt: skip


SMALL = _qwen3(256, 4, 4, 2, 64, 1024, 2048)
WORKLOADS = {
    "cpu": Workload(SMALL, 16, 8, 32, 64, 32),
    "learn": Workload(SMALL, 8, 8, 32, 16, 32),  # short responses: gate G4, the same model
    "gpu": Workload(
        _qwen3(1024, 28, 16, 8, 128, 3072, 151_936),
        64,
        8,
        256,
        512,
        16,
        shared_channel=0.6,
        end_channel=-64.0,
    ),  # the shape of Qwen3-0.6B
    "tiny": Workload(_qwen3(32, 2, 2, 1, 16, 64, 128), 2, 4, 6, 8, 4, rows=64),  # for the tests
}

LEARNING_RATE = 1e-6
LEARNING_RATE_TO_LEARN = 3e-3  # gate G4
EXACT_RESPONSES = 16  # gate G1: of the batch's beginning, computed in float32 too; whole groups
EXACT_MICRO_BATCH = 4  # responses at once there: attention in float32 keeps its matrix on a GPU
EPSILON = 1e-4  # added to a group's standard deviation; TRL's, which cannot be set there
CLIP = 0.2
SAMPLER_MEMORY = 0.3  # share of a GPU's memory for vLLM; TRL's default
CORRECTION_CAP = 2.0  # of a token's weight for what vLLM's policy differs by; the engine's default


def share_of_even(token_ids: Sequence[int]) -> float:
    """The reward of both: the share of even ids among the tokens of a response."""
    return sum(token % 2 == 0 for token in token_ids) / max(len(token_ids), 1)


@dataclass(frozen=True)
class Inputs:
    """Where a workload lies, and the SHA-256 of what training reads."""

    model: Path
    data: Path
    model_sha256: str
    data_sha256: str


def make(workload: Workload, cache: Path) -> Inputs:
    """The folder of a workload, made where it is not there yet.

    Args:
        workload: its sizes; of equal sizes there is one folder.
        cache: the folder of all.

    Returns:
        Paths and hashes, of what lies there now.
    """
    text = json.dumps(asdict(workload), sort_keys=True)
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:12]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _write(workload, Path(made) / "new")
            os.replace(Path(made) / "new", folder)  # whole, or not there
    model, data = folder / "model", folder / "train.jsonl"
    return Inputs(model, data, _sha256(model / "model.safetensors"), _sha256(data))


def _write(workload: Workload, folder: Path) -> None:
    folder.mkdir()
    _write_model(workload, folder / "model")
    words, draw = workload.model["vocab_size"], random.Random(0)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(workload.rows):
            ids = [draw.randrange(2, words) for _ in range(workload.prompt_tokens)]
            file.write(json.dumps({"prompt": " ".join(f"t{i}" for i in ids)}) + "\n")


def _write_model(workload: Workload, folder: Path) -> None:
    """Model and tokenizer, in the layout of ``save_pretrained``."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    size = workload.model["vocab_size"]
    words = Tokenizer(
        models.WordLevel({END: 0, PAD: 1} | {f"t{i}": i for i in range(2, size)}, unk_token=PAD)
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=PAD)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **workload.model, tie_word_embeddings=True, eos_token_id=0, pad_token_id=1, bos_token_id=None
        )
    )
    with torch.no_grad():  # one channel of the stream is the same for all tokens: it pushes the end away
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = workload.shared_channel
        embedding[0, 0] = workload.end_channel
        sample = torch.randint(
            2, size, (4, workload.prompt_tokens), generator=torch.Generator().manual_seed(0)
        )
        most = float(model(sample).logits.float().softmax(-1)[..., 0].max())
    if most > END_PROBABILITY:
        raise RuntimeError(
            f"The end token has a probability of {most:.3g}; expected at most {END_PROBABILITY}."
        )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
