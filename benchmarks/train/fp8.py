"""Training with products in 8 bits against bfloat16, on one GPU that has them (Hopper): what it costs, what it changes.

    pip install -e . -e 'plugins/fsdp[fp8]'
    python benchmarks/train/fp8.py --compile --out fp8.json
    python benchmarks/train/fp8.py --shape tiny        # the same program, emulated, on a CPU

A random model of 8 layers with the sizes of an 8B one. The first loss, gradient and its norm against those of bfloat16 (the
gradient as 1 - cosine over all weights), the losses of a few steps on one batch, and the median seconds of a step. One
JSON line for bfloat16 and one for each recipe; one that fails is told, and the next begins.
"""

from __future__ import annotations

import argparse
import gc
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
from engine_core.contracts.engines import WorkerContext
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, LossCall
from engine_plugin_fsdp import fp8
from engine_plugin_torch.sharded import here

HERE = Path(__file__).resolve().parent
SHAPE = {
    "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
TINY = SHAPE | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
RECIPES = (None, "tensorwise", "rowwise", "rowwise_with_gw_hp")


def main() -> None:
    given, begun = arguments(), time.monotonic()
    folder = Path(tempfile.mkdtemp())
    exact: list[torch.Tensor] = []
    rows: list[dict[str, Any]] = []
    try:
        Qwen3Config(**(TINY if given.shape == "tiny" else SHAPE)).save_pretrained(folder)
        for recipe in RECIPES:
            row: dict[str, Any] = {"recipe": recipe or "bf16", "compiled": given.compile}
            try:
                if time.monotonic() - begun > given.budget:
                    raise TimeoutError("not begun: the time was up")
                row |= measure(folder, recipe, given, exact)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            gc.collect()
            rows.append(row)
            print(json.dumps(row), flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps(rows, indent=1))
    finally:
        shutil.rmtree(folder)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384, help="of the batch")
    parser.add_argument("--length", type=int, default=2048, help="of each sequence")
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers: rounding joins other operators"
    )
    parser.add_argument("--shape", choices=["8b", "tiny"], default="8b", help="tiny: emulated, on a CPU")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no recipe begins")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def engine_class(plugins: PluginSet, tiny: bool) -> Any:
    """The plugin's; where the model is tiny one that emulates products in 8 bits, of layers of any size."""
    engine: Any = plugins.resolve("train_engines", "fsdp")
    if not tiny:
        return engine
    fp8.is_worth = lambda recipe, rows, columns: rows % fp8.MULTIPLE == columns % fp8.MULTIPLE == 0
    return type("EmulatedEngine", (engine,), {"emulates_fp8": True})


def measure(
    folder: Path, recipe: str | None, given: argparse.Namespace, exact: list[torch.Tensor]
) -> dict[str, Any]:
    """One engine's numbers; the first call leaves its gradient in ``exact``."""
    drawn = HERE.parent / "fsdp" / "on_device.py"  # random weights, made on the GPU
    plugins = PluginSet.load({"train_engines": {"fsdp"}}, [drawn.name], drawn.parent)
    tiny = given.shape == "tiny"
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    table = {"fp8": recipe, "mixed_precision": {"param_dtype": "bf16"}, "compile": given.compile}
    config = RoleConfig(
        backend="fsdp",
        max_tokens_per_rank=given.tokens,
        optim=OptimConfig(lr=1e-4),
        options=plugins.spec("train_engines", "fsdp").config(**table),
    )
    context = WorkerContext(plugins, "actor", device)
    begun = time.perf_counter()
    engine = engine_class(plugins, tiny)(config, ModelConfig(path=str(folder)), context)
    vocabulary = engine.module.config.vocab_size
    batch, losses, norms, seconds = tokens(given.tokens, given.length, vocabulary), [], [], []
    told: dict[str, Any] = {"built_s": round(time.perf_counter() - begun, 1)}
    for step in range(given.steps):
        settle(device)
        begin = time.perf_counter()
        losses.append(engine.forward_backward(batch, LossCall("nll")).loss)
        if step == 0:
            told["gradient_1_minus_cosine"] = compare(engine, exact)
        norms.append(engine.optimizer_step().grad_norm)
        settle(device)
        seconds.append(time.perf_counter() - begin)
    engine.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return told | {
        "losses": [round(loss, 5) for loss in losses],
        "first_grad_norm": norms[0],
        "first_step_seconds": round(seconds[0], 2),
        "step_seconds": round(statistics.median(seconds[2:]), 4),
    }


def compare(engine: Any, exact: list[torch.Tensor]) -> float:
    """1 - cosine of this gradient and the first engine's."""
    grads = [here(p.grad).bfloat16() for p in engine.module.parameters()]
    if not exact:
        exact += grads
    dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(grads, exact, strict=True))
    squares = [sum(float(g.double().square().sum()) for g in side) for side in (grads, exact)]
    return 1 - dot / (squares[0] * squares[1]) ** 0.5


def tokens(count: int, length: int, vocabulary: int) -> Batch:
    """Random sequences of ``length`` tokens, all learned."""
    ids = torch.randint(2, vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(count, dtype=torch.bool)
    columns = {"loss_mask": mask, "weights": mask / count, "token_share": mask / count}
    return Batch(ids, torch.full((count // length,), length), columns)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
