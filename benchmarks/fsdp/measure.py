"""Speed and memory of one model over the GPUs of a machine: sharded, copied, and by torch's DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/fsdp/measure.py --set speed --out speed.json

Each case builds an engine of its own on all ranks, takes steps on packed random sequences (forward, backward,
AdamW) and is freed. Memory is the peak of one GPU from the first step on; the gradient norm of the first step
says that cases compute the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from cases import CASES, shape_config

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))

from copied import CopiedEngine
from steps import empty, now, peak_gib, speed_of

from engine_core.assemble import load_config, plugins_for
from engine_core.bench.work import train_batch
from engine_core.engines.base import WorkerContext
from engine_core.types import LossCall


def engine_of(case, folder, rank, world, device):
    backend = "torch" if case["backend"] == "ddp" else case["backend"]
    keys = {
        "model.path": folder,
        "actor.backend": backend,
        "actor.max_tokens_per_rank": case["budget"],
    } | {f"actor.{backend}.{key}": value for key, value in case["options"].items()}
    if backend == "torch":
        keys |= {f"actor.torch.{key}": value for key, value in case["shared"].items()}
    else:
        keys |= {f"actor.fsdp.{key}": value for key, value in case["shared"].items()}
    config = load_config(HERE / "bench.toml", keys)
    context = WorkerContext(
        plugins=plugins_for(config), role="actor", device=device, rank=rank, world_size=world, total_steps=100
    )
    plugin_engine = context.plugins.resolve("train_engines", backend)
    engine = CopiedEngine if case["backend"] == "ddp" else plugin_engine
    return engine(config.actor, config.model, context)


def measure(case, folder, rank, world, device, steps, warmup):
    model = shape_config(case["shape"])
    engine = engine_of(case, folder, rank, world, device)
    empty(device)
    seconds, norms, layout = [], [], engine.layout
    slices = (
        layout.dp_size
    )  # ranks that share layers or tokens are given the same sequences, and those of all of them
    lengths = [case["length"]] * (case["sequences"] * world // slices)
    for step in range(warmup + steps):
        seed = step * slices + layout.dp_rank
        batch = train_batch(lengths, case["prompt"], model["vocab_size"], seed=seed)
        batch.tokens["weights"] /= slices
        batch.tokens["token_share"] /= slices
        start = now(device)
        micro = engine.forward_backward(batch, LossCall("nll")).num_micro_batches
        norms.append(engine.optimizer_step().grad_norm)
        seconds.append(now(device) - start)
    peak = peak_gib(device)
    engine.close()
    return row_of(case, model, seconds, warmup, norms, micro, peak, world, device)


def row_of(case, model, seconds, warmup, norms, micro, peak, world, device):
    lengths = [case["length"]] * case["sequences"]
    return {
        "case": case["name"],
        "world": world,
        "tokens_per_gpu": sum(lengths),
        "micro_batches": micro,
        "first_step_s": seconds[0],
        **speed_of(model, lengths, case["prompt"], seconds[warmup:], device),
        "peak_gib": peak,
        "grad_norm": norms[0],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=sorted(CASES), required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rows = []
    for case in CASES[options.set]:
        if options.only not in case["name"] or case.get("world", world) != world:
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape_config(case["shape"])))
            try:
                row = measure(case, folder, rank, world, device, options.steps, options.warmup)
            except torch.OutOfMemoryError as error:  # every rank holds the same, so each is here
                row = {"case": case["name"], "world": world, "error": str(error).partition("\n")[0]}
            empty(device)
            torch._dynamo.reset()
        rows.append(row)
        if rank == 0:
            print(line_of(row), flush=True)
            options.out.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


def line_of(row):
    if "error" in row:
        return f"{row['case']:44s} {row['error'][:70]}"
    mfu = f"{row['mfu']:6.1%}" if row["mfu"] else "     -"
    return (
        f"{row['case']:44s} {row['tokens_per_s_and_gpu']:9,.0f} tok/s/GPU  MFU {mfu}  {row['peak_gib']:6.1f} GiB"
        f"  {row['micro_batches']} micro  first {row['first_step_s']:.1f} s  norm {row['grad_norm']:.5g}"
    )


if __name__ == "__main__":
    sys.exit(main())
