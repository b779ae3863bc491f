"""What a step costs the host, with tensors so small that nothing else counts: one rank of several, whose messages go nowhere.

    python benchmarks/fsdp/host.py --out host.json

CPU milliseconds of one process, medians: forward and backward pass of 28 layers of width 64, recomputed, and the optimizer's step
(norm, clipping, AdamW); how many operators on sharded tensors a step runs. Against them a step that torch's AdamW takes over the
sharded tensors themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cases import PURE
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_core.config.assemble import load_config, plugins_for
from engine_core.contracts.engines import WorkerContext
from engine_core.types import LossCall
from engine_plugin_tools.bench.work import train_batch

HERE = Path(__file__).parent
MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 28, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
CASES = {  # options, and whether the step is the engine's own
    "full": ({}, True),
    "full, AdamW over sharded tensors": ({}, False),
    "full, two layers a unit": ({"wrap": {"layers_per_unit": 2}}, True),
    "full, four layers a unit": ({"wrap": {"layers_per_unit": 4}}, True),
    "grad_op": ({"sharding": "grad_op"}, True),
}


class Operators(TorchDispatchMode):
    """Counts operators on sharded tensors."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs or {})))
        return operator(*args, **(kwargs or {}))


def measure(name, folder, world, steps):
    options, own = CASES[name]
    table = {**PURE, "activation_checkpointing": "full", "compile": False, "probe": False, **options}
    keys = {"model.path": folder, "actor.max_tokens_per_rank": 64}
    config = load_config(HERE / "bench.toml", keys | {f"actor.fsdp.{key}": table[key] for key in table})
    plugins, device = plugins_for(config), torch.device("cpu")
    context = WorkerContext(
        plugins=plugins, role="actor", device=device, rank=0, world_size=world, total_steps=100
    )
    engine = plugins.resolve("train_engines", "fsdp")(config.actor, config.model, context)
    if not own:
        vars(engine.optimizer).pop("_init_group", None)
    batch, passes, updates = train_batch([32, 32], 8, MODEL["vocab_size"], seed=0), [], []
    for _ in range(3 + steps):
        start = time.process_time()
        engine.forward_backward(batch, LossCall("nll"))
        middle = time.process_time()
        engine.optimizer_step()
        passes.append(middle - start)
        updates.append(time.process_time() - middle)
    engine.forward_backward(batch, LossCall("nll"))
    with Operators() as seen:
        engine.optimizer_step()
    engine.close()
    medians = [1e3 * statistics.median(found[3:]) for found in (passes, updates)]
    return {"case": name, "passes_ms": medians[0], "step_ms": medians[1], "operators": seen.count}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)
    dist.init_process_group("fake", rank=0, world_size=options.ranks, store=FakeStore())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        for name in CASES:
            rows.append(measure(name, folder, options.ranks, options.steps))
            print(
                "{case:34s} passes {passes_ms:7.1f} ms  step {step_ms:6.1f} ms  {operators} operators on sharded tensors".format(
                    **rows[-1]
                ),
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
