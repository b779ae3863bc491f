"""The measurements: training, sampling, weight sync, whole steps and collectives, each on the workers of the run file."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.assemble import plugins_for
from engine_core.config.models import CheckpointConfig
from engine_core.contracts.runtime import Role
from engine_core.data import load_tokenizer
from engine_core.model_config import load_hf_config
from engine_core.types import LossCall
from engine_plugin_tools.bench.shapes import Cost, flops_of
from engine_plugin_tools.bench.work import requests, train_batch

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.runtime import Runtime, WorkerGroup

GIB = 1024**3


def bench_train(
    config: EngineConfig, sequences: int, length: int, prompt: int, steps: int, warmup: int
) -> dict[str, Any]:
    """Measure forward, backward and optimizer step of the actor on packed random sequences.

    Returns:
        Medians over ``steps``: seconds of a step and its two phases, tokens a second; ``first_step_s``, including
            compilation; MFU, if the device is known (``DENSE_BF16_FLOPS``).
    """
    model = load_hf_config(config.model).get_text_config(decoder=True).to_dict()
    _set_lengths(config, sequences, prompt, length)
    with _workers(config, {"actor": Role("train")}) as (_, groups):
        actor, micro = groups["actor"], 0
        seconds: list[float] = []
        updates: list[float] = []
        _reset_peak_memory()
        for step in range(warmup + steps):
            batch = train_batch([length] * sequences, prompt, model["vocab_size"], seed=step)
            start = _now()
            micro = actor.call("forward_backward", batch, loss=LossCall("nll")).result().num_micro_batches
            middle = _now()
            actor.call("optimizer_step").result()
            seconds.append(_now() - start)
            updates.append(_now() - middle)
        processes = actor.world_size
    tokens, step_s = sequences * length, statistics.median(seconds[warmup:])
    found = _head(config, "train", processes) | {
        "sequences": sequences,
        "length": length,
        "prompt": prompt,
        "tokens_per_step": tokens,
        "micro_batches": micro,
        "first_step_s": seconds[0],
        "step_s": step_s,
        "forward_backward_s": step_s - statistics.median(updates[warmup:]),
        "optimizer_s": statistics.median(updates[warmup:]),
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_and_process": tokens / step_s / processes,
    }
    cost, flops = Cost.of(model), flops_of(_device_name())
    if cost and flops:
        operations = cost.train([length] * sequences, sequences * (length - prompt))
        found["mfu"] = operations / step_s / flops / processes
    return found | _peak_memory()


def bench_rollout(
    config: EngineConfig, prompts: int, prompt: int, response: int, steps: int, warmup: int
) -> dict[str, Any]:
    """Measure the sampling of `group_size` responses for each of some random prompts."""
    group = config.rollout.group_size
    model = load_hf_config(config.model).get_text_config(decoder=True).to_dict()
    vocabulary = model["vocab_size"]
    roles = {"actor": Role("train", trainable=False), "rollout": Role("rollout")}
    with _workers(config, roles) as (runtime, groups):
        runtime.push_weights("actor", "rollout", 1)
        seconds, generated = [], []
        _reset_peak_memory()
        for step in range(warmup + steps):
            asked = requests(prompts, group, prompt, response, vocabulary, seed=step)
            with runtime.phase("generate"):
                start = _now()
                rollouts = groups["rollout"].call("generate", requests=asked).result()
                seconds.append(_now() - start)
            generated.append(sum(r.response_length for r in rollouts))
        processes = groups["rollout"].world_size
    rates = [n / s for n, s in zip(generated[warmup:], seconds[warmup:], strict=True)]
    found = _head(config, "rollout", processes) | {
        "prompts": prompts,
        "group_size": group,
        "prompt": prompt,
        "response": response,
        "first_step_s": seconds[0],
        "step_s": statistics.median(seconds[warmup:]),
        "generated_tokens": generated[-1],
        "tokens_per_s": statistics.median(rates),
    }
    return found | _peak_memory()


def bench_sync(config: EngineConfig, steps: int, warmup: int) -> dict[str, Any]:
    """Measure an update of the sampler's weights from the actor."""
    roles = {"actor": Role("train"), "rollout": Role("rollout")}
    with _workers(config, roles) as (runtime, groups):
        seconds, moved = [], 0
        for version in range(1, warmup + steps + 1):
            with runtime.phase("sync"):
                start = _now()
                moved = runtime.push_weights("actor", "rollout", version).bytes
                seconds.append(_now() - start)
        processes = groups["rollout"].world_size
    step_s = statistics.median(seconds[warmup:])
    found = {"bytes": moved, "first_step_s": seconds[0], "step_s": step_s, "gb_per_s": moved / step_s / 1e9}
    return _head(config, "sync", processes) | found


def bench_step(
    config: EngineConfig, steps: int, warmup: int, make: Callable[[EngineConfig], Any]
) -> dict[str, Any]:
    """Measure whole steps of the run file's trainer on its own data, in a folder that is deleted afterwards.

    Args:
        make: returns the trainer of a config.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.run.dir, config.run.steps = folder, warmup + steps
        config.run.finish_above = config.run.finish_below = config.run.fail_above = {}
        config.checkpoint = CheckpointConfig(at_end=False, at_stop=False)
        config.tracking.trackers = []  # nothing is sent to a service
        config.eval.every_steps = 0
        config.eval.at_start = config.eval.at_end = False
        trainer = make(config)
        _reset_peak_memory()
        try:
            trainer.train()
            processes = trainer.groups["actor"].world_size
            lines = (trainer.folder.path / "metrics.jsonl").read_text("utf-8").splitlines()
        finally:
            trainer.close()
    found = [json.loads(line) for line in lines][warmup:]
    names = sorted(name for name in found[-1] if name.startswith("time/"))
    medians = {name: statistics.median(line[name] for line in found if name in line) for name in names}
    first = {"first_step_s": json.loads(lines[0]).get("time/step")}
    return _head(config, "step", processes) | first | medians | _peak_memory()


def _set_lengths(config: EngineConfig, sequences: int, prompt: int, length: int) -> None:
    """Set the keys of a run with such sequences, by which the memory plan chooses micro-batches and recomputation."""
    config.data.prompts_per_step, config.algorithm.mini_batch_prompts = sequences, 0
    config.data.max_prompt_tokens = prompt
    sampled = {"max_response_tokens": length - prompt, "group_size": 1}
    config.rollout = config.rollout.model_copy(update=sampled)
    if hasattr(config.options, "max_tokens"):
        config.options.max_tokens = length


@contextmanager
def _workers(
    config: EngineConfig, roles: Mapping[str, Role]
) -> Iterator[tuple[Runtime, Mapping[str, WorkerGroup]]]:
    plugins = plugins_for(config)
    kind: Any = plugins.resolve("runtimes", config.runtime.backend)
    # only sampling reads a tokenizer here, and random weights of a shape have none
    sampled = "rollout" in roles
    runtime = kind(config, plugins, {"tokenizer": load_tokenizer(config.model)} if sampled else {})
    try:
        yield runtime, runtime.start(roles, 1_000_000)
    finally:
        runtime.close()


def _head(config: EngineConfig, part: str, processes: int) -> dict[str, Any]:
    """Return what was measured, and on what."""
    backend = config.actor.backend if part in ("train", "step") else config.rollout.backend
    return {
        "part": part,
        "model": Path(config.model.path).name,
        "backend": backend,
        "processes": processes,
        "device": _device_name(),
        "torch": torch.__version__,
    }


def _now() -> float:
    """Return seconds, after this process's device has finished its queue."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _reset_peak_memory() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()


def _peak_memory() -> dict[str, float]:
    """Return the peak memory of this process's device; empty if other processes did the work."""
    peak = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    return {"peak_memory_gib": peak / GIB} if peak else {}
