"""How long a save holds training up: the engine that writes beside training, and one that waits for the files.

    python benchmarks/train/save_stall.py --folder /path/on/the/disk/of/checkpoints

A model of 25 million float32 weights (100 MB; with the optimizer's moments a checkpoint of 300 MB), one
process on the CPU. Told for each engine, in seconds, the middle of several saves: how long ``save`` takes
to return, how long until the files are there, and one optimizer step beside the writing and without it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, LossCall

SHAPE = {
    "vocab_size": 12288, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary one")
    parser.add_argument("--saves", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        Qwen3Config(**SHAPE).save_pretrained(folder / "model")
        for backend in ("torch", "fsdp"):
            told = measure(backend, folder, arguments.saves)
            print(backend, {name: round(statistics.median(values), 3) for name, values in told.items()})
    finally:
        shutil.rmtree(folder)


def measure(backend: str, folder: Path, saves: int) -> dict[str, list[float]]:
    """Seconds by what they are of."""
    plugins = PluginSet.load({"train_engines": {backend}})
    options = plugins.spec("train_engines", backend).config()
    config = RoleConfig(backend=backend, options=options, optim=OptimConfig(lr=1e-4))
    context = WorkerContext(plugins, "actor", torch.device("cpu"))
    engine: Any = plugins.resolve("train_engines", backend)(
        config, ModelConfig(path=str(folder / "model")), context
    )
    step(engine)
    told: dict[str, list[float]] = {"returns": [], "written": [], "step_beside": [], "step_alone": []}
    for number in range(saves):
        begin = time.perf_counter()
        done = engine.save(folder / f"{backend}-{number}")
        told["returns"].append(time.perf_counter() - begin)
        told["step_beside"].append(step(engine))
        done.result()
        told["written"].append(time.perf_counter() - begin)
        told["step_alone"].append(step(engine))
        shutil.rmtree(folder / f"{backend}-{number}")
    engine.close()
    return told


def step(engine: Any) -> float:
    """Seconds of one optimizer step on 64 tokens."""
    tokens = torch.arange(2, 66)
    mask = torch.ones(64, dtype=torch.bool)
    batch = Batch(
        tokens, torch.tensor([64]), {"loss_mask": mask, "weights": mask / 64, "token_share": mask / 64}
    )
    begin = time.perf_counter()
    engine.forward_backward(batch, LossCall("nll"))
    engine.optimizer_step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
