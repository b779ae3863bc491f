"""What benchmarks of train engines share: the clock of a step, memory, and what is told of a case."""

from __future__ import annotations

import gc
import statistics
import time

import torch
import torch.distributed as dist

from engine_plugin_tools.bench.shapes import Cost, flops_of

GIB = 1024**3


def now(device):
    """Seconds, once all ranks and their devices are done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()
    return time.perf_counter()


def empty(device):
    """Free what nobody holds, and count the peak of memory from here."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def peak_gib(device):
    return torch.accelerator.max_memory_allocated() / GIB if device.type != "cpu" else 0.0


def speed_of(model, lengths, prompt, seconds, device):
    """Of one GPU's share of a batch.

    Args:
        model: the model's config.
        lengths: tokens of each sequence of the share.
        prompt: tokens of each that are not learned.
        seconds: of each step that is timed.
    """
    step_s, tokens = statistics.median(seconds), sum(lengths)
    cost = Cost.of(model)
    operations = cost.train(lengths, sum(n - prompt for n in lengths)) if cost else None
    flops = flops_of(torch.cuda.get_device_name()) if device.type == "cuda" else None
    return {
        "step_s": step_s,
        "tokens_per_s_and_gpu": tokens / step_s,
        "mfu": operations / step_s / flops if flops and operations else None,
    }
