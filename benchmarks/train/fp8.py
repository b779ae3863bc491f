"""Training with products in 8 bits against bfloat16, on one GPU that has them (Hopper): what it costs, what it changes.

    pip install -e . -e 'plugins/fsdp[fp8]'
    python benchmarks/train/fp8.py

A random model of 8 layers with the sizes of an 8B one. The first loss, gradient and its norm against those of bfloat16 (the
gradient as 1 - cosine over all weights), the losses of a few steps on one batch, and the median seconds of a step. One
JSON line for bfloat16 and one for each recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.engines.base import WorkerContext
from engine_core.engines.sharded import here
from engine_core.plugins import PluginSet
from engine_core.types import Batch, LossCall

SHAPE = {
    "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
RECIPES = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384, help="of the batch: sequences of 2048")
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers: rounding joins other operators"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    exact: list[torch.Tensor] = []
    try:
        Qwen3Config(**SHAPE).save_pretrained(folder)
        for recipe in RECIPES:
            told = measure(folder, recipe, arguments, exact)
            print(json.dumps({"recipe": recipe or "bf16", **told}), flush=True)
    finally:
        shutil.rmtree(folder)


def measure(
    folder: Path, recipe: str | None, arguments: argparse.Namespace, exact: list[torch.Tensor]
) -> dict[str, Any]:
    """One engine's numbers; the first call leaves its gradient in ``exact``."""
    plugins = PluginSet.load({"train_engines": {"fsdp"}})
    table = {"fp8": recipe, "mixed_precision": {"param_dtype": "bf16"}, "compile": arguments.compile}
    config = RoleConfig(
        backend="fsdp",
        max_tokens_per_rank=arguments.tokens,
        optim=OptimConfig(lr=1e-4),
        options=plugins.spec("train_engines", "fsdp").config(**table),
    )
    context = WorkerContext(plugins, "actor", torch.device("cuda", 0))
    engine: Any = plugins.resolve("train_engines", "fsdp")(config, ModelConfig(path=str(folder)), context)
    batch, losses, norms, seconds = tokens(arguments.tokens), [], [], []
    told: dict[str, Any] = {}
    for step in range(arguments.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses.append(engine.forward_backward(batch, LossCall("nll")).loss)
        if step == 0:
            told["gradient_1_minus_cosine"] = compare(engine, exact)
        norms.append(engine.optimizer_step().grad_norm)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    engine.close()
    torch.cuda.empty_cache()
    return told | {
        "losses": [round(loss, 5) for loss in losses],
        "first_grad_norm": norms[0],
        "step_seconds": round(statistics.median(seconds[2:]), 4),
    }


def compare(engine: Any, exact: list[torch.Tensor]) -> float:
    """1 - cosine of this gradient and the first engine's."""
    grads = [here(p.grad).bfloat16().cpu() for p in engine.module.parameters()]
    if not exact:
        exact += grads
    dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(grads, exact, strict=True))
    squares = [sum(float(g.double().square().sum()) for g in side) for side in (grads, exact)]
    return 1 - dot / (squares[0] * squares[1]) ** 0.5


def tokens(count: int) -> Batch:
    """Random sequences of 2048 tokens, all learned."""
    ids = torch.randint(2, 32768, (count,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(count, dtype=torch.bool)
    columns = {"loss_mask": mask, "weights": mask / count, "token_share": mask / count}
    return Batch(ids, torch.full((count // 2048,), 2048), columns)


if __name__ == "__main__":
    main()
