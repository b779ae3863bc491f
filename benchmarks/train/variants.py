"""Variants of one training step, one after another in one process: what raises tokens a second on this device?

    python benchmarks/train/variants.py                                # all, on the shape and work of README.md
    python benchmarks/train/variants.py --only base,coordinate_descent --json
    python benchmarks/train/variants.py --shape tiny --sequences 4 --length 32 --prompt 8 --only base,eager

A variant that fails has its error in the table, and the others go on. Each builds its own model; what is compiled is
forgotten in between. Numbers of one run differ by 2 to 3%: repeat what is close with --steps 10.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

from engine_core import load_config
from engine_plugin_tools.bench.parts import bench_train
from engine_plugin_tools.bench.shapes import write_shape
from engine_plugin_torch import units

FILE = Path(__file__).parent / "bench.toml"
COLUMNS = (
    "tokens_per_s",
    "mfu",
    "step_s",
    "optimizer_s",
    "peak_memory_gib",
    "first_step_s",
)


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


@contextlib.contextmanager
def one_length() -> Iterator[None]:
    """Compile for the number of tokens that is seen, not for any."""
    before = units.compiled
    units.compiled = lambda function, mode="default": torch.compile(function, dynamic=False)
    try:
        yield
    finally:
        units.compiled = before


def inductor(**settings: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Settings of the compiler's back end."""
    return lambda: torch._inductor.config.patch(**settings)


@dataclass(frozen=True)
class Variant:
    """Settings of the run file, and what the run stands in."""

    settings: dict[str, Any]
    around: Callable[[], contextlib.AbstractContextManager[None]] = nothing


VARIANTS = {
    "base": Variant({}),
    "eager": Variant({"compile": False}),
    "recompute_logits": Variant({"log_prob_recompute": True}),
    "chunk_4096": Variant({"log_prob_chunk_tokens": 4096}),
    "chunk_16384": Variant({"log_prob_chunk_tokens": 16384}),
    "chunk_whole": Variant({"log_prob_chunk_tokens": 65536}),
    "budget_24576": Variant({"max_tokens_per_rank": 24576}),
    "budget_98304": Variant({"max_tokens_per_rank": 98304}),
    "budget_auto": Variant({"max_tokens_per_rank": "auto"}),
    "coordinate_descent": Variant({}, inductor(coordinate_descent_tuning=True)),
    "one_length": Variant({}, one_length),
    "one_length_autotuned": Variant({}, lambda: _both(one_length, inductor(max_autotune_gemm=True))),
    "combined_kernels": Variant({}, inductor(combo_kernels=True)),
    "sdpa": Variant({"attention": "sdpa"}),
    "checkpointing": Variant({"activation_checkpointing": True}),
    "checkpointing_98304": Variant({"activation_checkpointing": True, "max_tokens_per_rank": 98304}),
    "fp32_weights": Variant({"param_dtype": "fp32", "compute_dtype": "bf16"}),
    "fp32_weights_auto": Variant(
        {"param_dtype": "fp32", "compute_dtype": "bf16", "max_tokens_per_rank": "auto"}
    ),
}
PLACES = {"max_tokens_per_rank": "actor", "attention": "model"}


@contextlib.contextmanager
def _both(*contexts: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def run(name: str, shape: str, work: dict[str, int]) -> dict[str, Any]:
    """What ``bench_train`` says of a variant, or its error."""
    variant = VARIANTS[name]
    keys = {f"{PLACES.get(key, 'actor.torch')}.{key}": value for key, value in variant.settings.items()}
    torch._dynamo.reset()
    try:
        with tempfile.TemporaryDirectory() as folder, variant.around():
            keys["model.path"] = write_shape(shape, Path(folder) / shape)
            found = bench_train(load_config(FILE, keys), **work)
    except Exception as error:  # of one variant: it is shown, and the others go on
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100]}
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Variants of one training step.")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--only", default=",".join(VARIANTS), help="names, with commas between")
    parser.add_argument("--json", action="store_true")
    defaults = {"sequences": 128, "length": 768, "prompt": 256, "steps": 4, "warmup": 3}
    for key, value in defaults.items():
        parser.add_argument(f"--{key}", type=int, default=value)
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variants {', '.join(unknown)}; known: {', '.join(VARIANTS)}")
    work, found = {key: getattr(given, key) for key in defaults}, {}
    if not given.json:
        print("  ".join(["variant".ljust(22), *(column.rjust(16) for column in COLUMNS)]), flush=True)
    for name in names:
        found[name] = one = run(name, given.shape, work)
        if not given.json:
            cells = [_text(one.get(column)).rjust(16) for column in COLUMNS]
            print(
                "  ".join([name.ljust(22), one["error"]] if "error" in one else [name.ljust(22), *cells]),
                flush=True,
            )
    if given.json:
        print(json.dumps(found, indent=1))


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
