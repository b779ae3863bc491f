"""What the benchmarks of vLLM share: a model of a shape with random weights, its words, where results go, a clock."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine_plugin_tools.bench.shapes import SHAPES

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}

LAUNCHED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|VLLM_(PORT|DP_\w+)|(PET|TORCHELASTIC)_\w+"
)
"""Variables of a launcher: scripts that it started side by side would take one port, or each other for ranks of one run."""


def alone() -> None:
    """Be a run of its own, whoever started this process."""
    for name in list(os.environ):
        if LAUNCHED.fullmatch(name):
            del os.environ[name]


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")


def keep_multicast_off() -> None:
    """Of NVLink, for this process and those that it starts: a machine that is shared may not survive it."""
    for name, value in MULTICAST_OFF.items():
        os.environ.setdefault(name, value)


def write_model(shape: str, folder: Path, seed: int = 0) -> Path:
    """A folder with config, random bf16 weights made on the device, and a tokenizer of ``t2 t3 t4 ...``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(
        **SHAPES[shape] | {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    )
    if shape == "tiny":
        config.head_dim = 32  # what vLLM's attention knows
    torch.manual_seed(seed)
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of this process, which may only start others
    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, config.vocab_size)}
    made = Tokenizer(models.WordLevel(vocab=words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(prefix="##")
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    return folder


def now() -> float:
    """Seconds, with everything done that was asked of the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], Any]) -> float:
    """What one call takes."""
    start = now()
    work()
    return now() - start


def free_gib() -> float:
    """Of the device's memory."""
    return torch.cuda.mem_get_info()[0] / 1024**3 if torch.cuda.is_available() else 0.0


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def write(name: str, found: dict[str, Any], quiet: bool = False) -> None:
    """As JSON into ``$OUT`` (default: the working directory), and as lines unless ``quiet``."""
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"vllm_{name}.json").write_text(json.dumps(found, indent=1))
    if quiet:
        return
    for key, value in found.items():
        print(
            f"{name:9} {key:34} {value:,.4g}" if isinstance(value, float) else f"{name:9} {key:34} {value}",
            flush=True,
        )
