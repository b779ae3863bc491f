"""Speed and memory of one model over the GPUs of a machine: sharded, copied, and by torch's DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/fsdp/measure.py --set speed --out speed.json

Each case builds an engine of its own on all ranks, takes steps on packed random sequences (forward, backward,
AdamW) and is freed. Memory is the peak of one GPU from the first step on; the gradient norm of the first step
says that cases compute the same. Rows are written after every case; one that fails is told and the next begins;
``--budget`` seconds after the start none begins. ``--shape tiny`` runs the same cases of a tiny model, on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from cases import CASES, shape_config, shrunk
from tables import table

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))

from copied import CopiedEngine
from steps import empty, now, peak_gib, speed_of
from torch.utils.checkpoint import checkpoint

from engine_core.config.assemble import load_config, plugins_for
from engine_core.contracts.engines import WorkerContext
from engine_core.types import LossCall
from engine_plugin_fsdp import engine as fsdp_engine
from engine_plugin_tools.bench.work import train_batch
from engine_plugin_torch import engine as torch_engine
from engine_plugin_torch import units


def engine_of(case, folder, rank, world, device):
    backend = "torch" if case["backend"] == "ddp" else case["backend"]
    keys = {
        "model.path": folder,
        "actor.backend": backend,
        "actor.max_tokens_per_rank": case["budget"],
        f"actor.{backend}.activation_checkpointing": "none" if backend == "fsdp" else False,
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


@contextlib.contextmanager
def recomputed_in_the_graph():
    """Units that are built within it compile their recomputation: one graph of the backward pass, instead of a second call of the forward's."""

    def checkpointed(module, names, wanted=None):
        for name in names:
            unit = module.get_submodule(name)
            again = functools.partial(
                checkpoint, unit.forward.plain, use_reentrant=False, preserve_rng_state=False
            )
            unit.forward = units.CompiledForward(again, name)

    users = (torch_engine, fsdp_engine)
    try:
        for user in users:
            user.checkpoint_units = checkpointed
        yield
    finally:
        for user in users:
            user.checkpoint_units = units.checkpoint_units


def measure(case, folder, rank, world, device, steps, warmup):
    model = shape_config(case["shape"])
    begun = now(device)
    in_graph = case.get("in_graph", False)
    torch._dynamo.config.optimize_ddp = not in_graph  # it cannot cut a graph that recomputes
    with recomputed_in_the_graph() if in_graph else contextlib.nullcontext():
        engine = engine_of(case, folder, rank, world, device)
    built_s = now(device) - begun
    empty(device)
    seconds, norms, layout = [], [], engine.layout
    # ranks that share layers or tokens are given the same sequences, and those of all of them
    slices = layout.dp_size
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
    return row_of(case, model, seconds, warmup, norms, micro, peak, world, device) | {"built_s": built_s}


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


def attempt(case, rank, world, device, steps, warmup):
    """One row; of a case that failed, why. What fails on one rank alone ends all when its peers have waited for long enough."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape_config(case["shape"])))
        try:
            row = measure(
                case, folder, rank, world, device, case.get("steps", steps), case.get("warmup", warmup)
            )
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            row = {"case": case["name"], "world": world, "error": why}
    empty(device)
    torch._dynamo.reset()
    return row


def main():
    options = arguments()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))  # torchrun says 1
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=120))
    until, rows = time.monotonic() + options.budget, []
    for case in CASES[options.set]:
        if options.only not in case["name"] or world < case.get("least_world", 1):
            continue
        case = shrunk(case) if options.shape == "tiny" else case
        if within(until):
            row = attempt(case, rank, world, device, options.steps, options.warmup)
        else:
            row = {"case": case["name"], "world": world, "error": "not begun: the time was up"}
        rows.append(row)
        if rank == 0:
            print(line_of(row), flush=True)
            options.out.write_text(json.dumps(rows, indent=1))
    if rank == 0:
        print(table([rows]), flush=True)
    dist.destroy_process_group()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=sorted(CASES), required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--shape", choices=["tiny"], help="of all cases, instead of their own")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no case begins")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def within(until):
    """Whether the first rank's clock is below ``until``: all ranks begin a case or none does."""
    told = torch.tensor([time.monotonic() < until], dtype=torch.int64)
    dist.broadcast(told, 0)
    return bool(told)


def line_of(row):
    if "error" in row:
        return f"{row['case']:44s} {row['error'][:70]}"
    mfu = f"{row['mfu']:6.1%}" if row["mfu"] else "     -"
    return (
        f"{row['case']:44s} {row['tokens_per_s_and_gpu']:9,.0f} tok/s/GPU  MFU {mfu}  {row['peak_gib']:6.1f} GiB"
        f"  {row['micro_batches']} micro  built {row['built_s']:.1f} s  first {row['first_step_s']:.1f} s"
        f"  norm {row['grad_norm']:.5g}"
    )


if __name__ == "__main__":
    sys.exit(main())
