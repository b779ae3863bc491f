"""The measurements: training, sampling, weight sync and whole steps, each on the workers of the run file."""

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

from engine_core.assemble import plugins_for
from engine_core.bench.shapes import Cost, peak_flops
from engine_core.bench.work import requests, train_batch
from engine_core.config.models import CheckpointConfig
from engine_core.data import load_tokenizer
from engine_core.engines.model_loading import load_hf_config
from engine_core.errors import ConfigError
from engine_core.runtime.base import Role
from engine_core.types import LossCall

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.runtime.base import Runtime, WorkerGroup

GIB = 1024**3


def bench_train(
    config: EngineConfig, sequences: int, length: int, prompt: int, steps: int, warmup: int
) -> dict[str, Any]:
    """Forward, backward and optimizer step of the actor on packed random sequences.

    Returns:
        Medians over ``steps``: seconds of a step, tokens a second; ``first_step_s``, with what is compiled
        in it; MFU where the device's peak is known.
    """
    model = load_hf_config(config.model).get_text_config(decoder=True).to_dict()
    with _workers(config, {"actor": Role("train")}) as (_, groups):
        actor, seconds, micro = groups["actor"], [], 0
        _reset_peak_memory()
        for step in range(warmup + steps):
            batch = train_batch([length] * sequences, prompt, model["vocab_size"], seed=step)
            start = _now()
            micro = actor.call("forward_backward", batch, loss=LossCall("nll")).result().num_micro_batches
            actor.call("optimizer_step").result()
            seconds.append(_now() - start)
        processes = getattr(actor, "world_size", 1)
    tokens, step_s = sequences * length, statistics.median(seconds[warmup:])
    found = _head(config, "train", processes) | {
        "sequences": sequences,
        "length": length,
        "prompt": prompt,
        "tokens_per_step": tokens,
        "micro_batches": micro,
        "first_step_s": seconds[0],
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_and_process": tokens / step_s / processes,
    }
    cost, peak = Cost.of(model), peak_flops(_device_name())
    if cost and peak:
        operations = cost.train([length] * sequences, sequences * (length - prompt))
        found["mfu"] = operations / step_s / peak / processes
    return found | _peak_memory()


def bench_rollout(
    config: EngineConfig, prompts: int, prompt: int, response: int, steps: int, warmup: int
) -> dict[str, Any]:
    """Sampling `group_size` responses for each of some random prompts."""
    group = config.rollout.group_size
    vocabulary = load_hf_config(config.model).get_text_config(decoder=True).vocab_size
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
        processes = getattr(groups["rollout"], "world_size", 1)
    rates = [n / s for n, s in zip(generated[warmup:], seconds[warmup:], strict=True)]
    return (
        _head(config, "rollout", processes)
        | {
            "prompts": prompts,
            "group_size": group,
            "prompt": prompt,
            "response": response,
            "first_step_s": seconds[0],
            "step_s": statistics.median(seconds[warmup:]),
            "generated_tokens": generated[-1],
            "tokens_per_s": statistics.median(rates),
        }
        | _peak_memory()
    )


def bench_sync(config: EngineConfig, steps: int, warmup: int) -> dict[str, Any]:
    """Bringing the actor's weights to the sampler."""
    roles = {"actor": Role("train"), "rollout": Role("rollout")}
    with _workers(config, roles) as (runtime, groups):
        seconds, moved = [], 0
        for version in range(1, warmup + steps + 1):
            with runtime.phase("sync"):
                start = _now()
                moved = runtime.push_weights("actor", "rollout", version).bytes
                seconds.append(_now() - start)
        processes = getattr(groups["rollout"], "world_size", 1)
    step_s = statistics.median(seconds[warmup:])
    found = _head(config, "sync", processes) | {
        "bytes": moved,
        "first_step_s": seconds[0],
        "step_s": step_s,
    }
    return found | ({"gb_per_s": moved / step_s / 1e9} if moved else {})


def bench_step(
    config: EngineConfig, steps: int, warmup: int, make: Callable[[EngineConfig], Any]
) -> dict[str, Any]:
    """Whole steps of the run file's trainer on its own data, in a folder that is deleted afterwards.

    Args:
        make: the trainer of a config.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.run.dir, config.run.steps = folder, warmup + steps
        config.checkpoint = CheckpointConfig(at_end=False)
        config.tracking.trackers = []  # no service hears of it
        config.eval.every_steps = 0
        config.eval.at_start = config.eval.at_end = False
        trainer = make(config)
        _reset_peak_memory()
        try:
            trainer.train()
            lines = (trainer.folder.path / "metrics.jsonl").read_text("utf-8").splitlines()
        finally:
            trainer.close()
    found = [json.loads(line) for line in lines][warmup:]
    names = [name for name in found[-1] if name.startswith("time/")]
    medians = {
        name: statistics.median(line[name] for line in found if name in line) for name in sorted(names)
    }
    return (
        _head(config, "step", 1)
        | {"first_step_s": json.loads(lines[0]).get("time/step")}
        | medians
        | _peak_memory()
    )


@contextmanager
def _workers(
    config: EngineConfig, roles: Mapping[str, Role]
) -> Iterator[tuple[Runtime, Mapping[str, WorkerGroup]]]:
    plugins = plugins_for(config)
    live = {"tokenizer": load_tokenizer(config.model)} if "rollout" in roles else {}
    runtime = plugins.resolve("runtimes", config.runtime.backend)(config, plugins, live)
    try:
        yield runtime, runtime.start(roles, 1_000_000)
    finally:
        runtime.close()


def _head(config: EngineConfig, part: str, processes: int) -> dict[str, Any]:
    """What was measured, and where."""
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
    """Seconds, with everything done that was asked of this process's device."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _reset_peak_memory() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()


def _peak_memory() -> dict[str, float]:
    """Of this process's device; other workers have their own."""
    if not torch.accelerator.is_available():
        return {}
    return {"peak_memory_gib": torch.accelerator.max_memory_allocated() / GIB}


def check_lengths(length: int, prompt: int) -> None:
    """Refuse a prompt that leaves no token to learn."""
    if prompt >= length:
        raise ConfigError(
            f"--prompt {prompt} leaves nothing of --length {length} to learn. Give a smaller one."
        )
