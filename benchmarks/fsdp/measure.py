"""Speed and memory of one model over the GPUs of a machine: sharded, copied, and by torch's DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/fsdp/measure.py --set speed --out speed.json

Each case builds an engine of its own on all ranks, takes steps on packed random sequences (forward, backward,
AdamW) and is freed. Memory is the peak of one GPU from the first step on; the gradient norm of the first step
says that cases compute the same.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cases import CASES, shape_config
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine_core.assemble import load_config, plugins_for
from engine_core.bench.devices import device_of
from engine_core.bench.shapes import Cost
from engine_core.bench.work import train_batch
from engine_core.engines.base import Layout, WorkerContext
from engine_core.engines.torch_engine import TorchEngine
from engine_core.types import LossCall

HERE = Path(__file__).parent
GIB = 1024**3


class Holder(nn.Module):
    """Runs a function of the module inside of the forward pass that DistributedDataParallel watches."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, run):
        return run()


class CopiedEngine(TorchEngine):
    """The reference engine below torch's DistributedDataParallel: what sharding is compared with."""

    @property
    def layout(self):
        return Layout(dist.get_rank(), dist.get_world_size(), True)

    def _make_forward(self):
        made = super()._make_forward()
        self.copies = DistributedDataParallel(Holder(self.module), gradient_as_bucket_view=True)
        self.copies.register_comm_hook(None, _sum_gradients)
        return made

    def _outputs(self, micro, grad, watched=()):
        return self.copies(functools.partial(self.forward, micro, grad, watched))


def _sum_gradients(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


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
    _empty(device)
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
        start = _now(device)
        micro = engine.forward_backward(batch, LossCall("nll")).num_micro_batches
        norms.append(engine.optimizer_step().grad_norm)
        seconds.append(_now(device) - start)
    peak = torch.accelerator.max_memory_allocated() / GIB if device.type != "cpu" else 0.0
    engine.close()
    return row_of(case, model, seconds, warmup, norms, micro, peak, world, device)


def row_of(case, model, seconds, warmup, norms, micro, peak, world, device):
    tokens, step_s = case["length"] * case["sequences"], statistics.median(seconds[warmup:])
    operations = Cost.of(model).train(
        [case["length"]] * case["sequences"], case["sequences"] * (case["length"] - case["prompt"])
    )
    known = device_of(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return {
        "case": case["name"],
        "world": world,
        "tokens_per_gpu": tokens,
        "micro_batches": micro,
        "step_s": step_s,
        "first_step_s": seconds[0],
        "tokens_per_s_and_gpu": tokens / step_s,
        "mfu": operations / step_s / known.flops if known else None,
        "peak_gib": peak,
        "grad_norm": norms[0],
    }


def _now(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()
    return time.perf_counter()


def _empty(device):
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


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
            _empty(device)
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
