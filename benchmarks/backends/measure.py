"""One rank of run.py: builds the engines of one family of cases, one after another, and writes down what each does.

It imports what the family needs and waits for its order on stdin, so that the next family is ready when one ends. A case that
fails ends the process: its neighbours wait for it in a collective, and run.py ends them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))

from copied import CopiedEngine
from steps import GIB, empty, now, peak_gib, speed_of

from engine_core.config.assemble import load_config, plugins_for
from engine_core.contracts.engines import WorkerContext
from engine_core.types import LossCall
from engine_plugin_tools.bench.work import train_batch

MODULES = {
    "torch": ["engine_plugin_fsdp.engine", "engine_plugin_torch.engine"],
    "megatron": ["engine_plugin_megatron.engine", "engine_plugin_megatron.models.build"],
    "deepspeed": ["engine_plugin_deepspeed.engine"],
}
PATIENCE = 120  # seconds that a rank waits for another


def engine_of(case, folder, rank, world, device):
    backend = "torch" if case["backend"] == "ddp" else case["backend"]
    keys = {
        "model.path": folder,
        "actor.backend": backend,
        "actor.max_tokens_per_rank": case["budget"] or sum(case["lengths"]),
        **{f"actor.{backend}.{key}": value for key, value in case["options"].items()},
    }
    if backend != "megatron":  # which recomputes nothing unless it is asked to
        keys.setdefault(f"actor.{backend}.activation_checkpointing", "none" if backend == "fsdp" else False)
    config = load_config(HERE / "bench.toml", keys)
    plugins = plugins_for(config)
    context = WorkerContext(
        plugins=plugins, role="actor", device=device, rank=rank, world_size=world, total_steps=100
    )
    kind = CopiedEngine if case["backend"] == "ddp" else plugins.resolve("train_engines", backend)
    return kind(config.actor, config.model, context)


def measure(case, order, rank, world, device):
    """Losses, norms, seconds and memory of one case; what every rank but the first gives is not used."""
    folder, model = order["folders"][case["model"]], order["models"][case["model"]]
    begun = now(device)
    empty(device)
    before = torch.accelerator.memory_allocated() / GIB if device.type != "cpu" else 0.0
    told = {"case": case["name"], "world": case["ranks"] or world}
    steps = None
    if rank < told["world"]:
        engine = engine_of(case, folder, rank, told["world"], device)
        built = time.perf_counter() - begun
        steps = [_step(engine, case, model, number, device) for number in range(order["steps"])]
    peak = torch.tensor([peak_gib(device) if rank < told["world"] else 0.0], device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if steps is not None:
        engine.close()
        share = case["lengths"][: len(case["lengths"]) // told["world"]]
        timed = [step["seconds"] for step in steps[order["warmup"] :]]
        told |= {
            "micro_batches": steps[0]["micro_batches"],
            "build_s": built,
            "first_step_s": steps[0]["seconds"],
            **(speed_of(model, share, case["prompt"], timed, device) if timed else {}),
            "losses": [step["loss"] for step in steps],
            "grad_norms": [step["norm"] for step in steps],
        }
        del engine
    empty(device)
    torch._dynamo.reset()
    return {**told, "peak_gib": peak.item(), "held_before_gib": before, "case_s": now(device) - begun}


def _step(engine, case, model, number, device):
    """One step on this rank's part of the global batch, which is the same under every layout."""
    layout, alone = engine.layout, case["ranks"] == 1
    batch = train_batch(case["lengths"], case["prompt"], model["vocab_size"], seed=number)
    share = batch.select(range(layout.dp_rank, len(batch), layout.dp_size))
    clock = _alone if alone else now
    start = clock(device)
    trained = engine.forward_backward(share, LossCall("nll"))
    norm = engine.optimizer_step().grad_norm
    seconds = clock(device) - start
    loss = trained.loss
    if case["backend"] == "ddp":  # each rank has that of its part
        total = torch.tensor([loss], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        loss = total.item()
    return {"loss": loss, "norm": norm, "seconds": seconds, "micro_batches": trained.num_micro_batches}


def _alone(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def ready(family, on_cpu):
    """Import what the family needs: most of a start."""
    if on_cpu and family == "megatron":
        importlib.import_module("engine_plugin_megatron.cpu_emulation").emulate()
    for name in MODULES[family]:
        importlib.import_module(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(MODULES), required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    options = parser.parse_args()
    if options.family == "deepspeed":
        os.environ["DS_ACCELERATOR"] = options.device
    ready(options.family, options.device == "cpu")
    order = json.loads(sys.stdin.readline() or "{}")
    if not order:
        return
    rank, world = order["rank"], order["world"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(order["store"], world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    for case in order["cases"]:
        if rank == 0:
            _note(order, {"begun": case["name"]})
        try:
            row = measure(case, order, rank, world, device)
        except BaseException as error:  # told, and the process ends: other ranks may wait for this one
            told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _note(order, {"failed": case["name"], "rank": rank, "error": told})
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        if rank == 0:
            _note(order, {"done": case["name"], "row": row})
    os._exit(0)  # what libraries do at their end may wait for others, too


def _note(order, told):
    """A line of the file that all ranks append to."""
    with open(order["notes"], "a") as file:
        file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
