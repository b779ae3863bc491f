"""Where the time of an update, a switch and a run of the driver goes: methods of live objects, timed one by one."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from setting import device, median, now, seconds

REPEATS = 7


def warm(length: float = 0.5) -> None:
    """Keep the GPU busy: one that idles runs at a sixth of its clock, which a trainer's never does before an update."""
    if device().type != "cuda":
        return
    matrix = torch.randn(4096, 4096, device=device(), dtype=torch.bfloat16)
    end = time.monotonic() + length
    while time.monotonic() < end:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()


@contextlib.contextmanager
def timed(*methods: tuple[Any, str, str], wait: bool = False) -> Iterator[dict[str, float]]:
    """Seconds spent in methods, by the name given to each; in it, calls of one in another count in both.

    Args:
        methods: object, name of the method, name in the result.
        wait: for the device before and after each call; else what the caller's thread spends.
    """
    spent = {label: 0.0 for _, _, label in methods}
    clock: Callable[[], float] = now if wait else time.perf_counter

    def around(method: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            start = clock()
            try:
                return method(*arguments, **more)
            finally:
                spent[label] += clock() - start

        return call

    for owner, name, label in methods:
        setattr(owner, name, around(getattr(owner, name), label))
    try:
        yield spent
    finally:
        for owner, name, _ in methods:
            with contextlib.suppress(AttributeError):
                delattr(owner, name)


def of_update(engine: Any, weights: list[tuple[str, Any]]) -> dict[str, float]:
    """Milliseconds of the parts of an update, each alone with the device waited for, and of the whole."""
    from engine_plugin_vllm_rollout.weights import Checksum

    updater, llm = engine._updater, engine._llm
    parts: dict[str, Callable[[], Any]] = {
        "checks_of_names": lambda: list(updater._checked(iter(weights), 0)),
        "checksum": lambda: _checksum(Checksum(), weights),
        "reset_prefix_cache_in_flight": lambda: llm.reset_prefix_cache(reset_running_requests=True),
        "whole": lambda: engine.update_weights(iter(weights), engine.version + 1),
    }
    if updater.how == "direct":
        parts["copies"] = lambda: updater._load(weights)
    found = {f"update_part_{name}_ms": 1000 * median(_times(work)) for name, work in parts.items()}
    return found | {"update_kv_blocks": llm.vllm_config.cache_config.num_gpu_blocks or 0}


def _times(work: Callable[[], Any]) -> list[float]:
    for _ in range(2):
        work()
    return [seconds(work) for _ in range(REPEATS)]


def _checksum(checksum: Any, weights: list[tuple[str, Any]]) -> None:
    checksum.add(weights)
    checksum.result()


def of_switch(engine: Any, weights: list[tuple[str, Any]], level: int) -> dict[str, float]:
    """Milliseconds of the parts of one switch at this sleep level: the trainer's turn, new weights, the sampler's turn."""
    llm = engine._llm
    core = llm.engine_core.engine_core
    before = torch.cuda.mem_get_info()[0]
    with timed(
        (core, "_reset_caches", "reset_caches"), (core.model_executor, "sleep", "free"), wait=True
    ) as of_sleep:
        slept = seconds(lambda: engine.sleep(keep=("weights",)))
    given = torch.cuda.mem_get_info()[0] - before
    with timed((core.model_executor, "wake_up", "take_weights"), wait=True) as of_weights:
        updated = seconds(lambda: engine.update_weights(iter(weights), engine.version + 1))
    with timed((core.model_executor, "wake_up", "take_cache"), wait=True) as of_cache:
        woken = seconds(engine.wake)
    parts = {**of_sleep, **of_weights, **of_cache, "sleep": slept, "update": updated, "wake": woken}
    parts["total"] = slept + updated + woken
    found = {f"switch_level{level}_part_{name}_ms": 1000 * value for name, value in parts.items()}
    found["gc_collect_ms"] = 1000 * seconds(gc.collect)  # vLLM's sleep does so, too
    return found | {f"switch_level{level}_gib": given / 1024**3}


def of_run(engine: Any, name: str, run: Callable[[], float]) -> dict[str, float]:
    """Seconds of one run of a driver: what its thread spends in vLLM's step, and outside of it."""
    llm = engine._llm
    methods = [
        (llm, "add_request", "add_request"),
        (llm, "step", "vllm_step"),
        (llm.engine_core, "get_output", "vllm_core"),
        (engine, "add", "add"),
        (engine, "_ended", "rollouts"),
    ]
    with timed(*methods) as spent:
        start = now()
        run()
        whole = now() - start
    spent["outside_of_step"] = whole - spent["vllm_step"]
    return {f"parts_{name}_{label}_s": value for label, value in (spent | {"whole": whole}).items()}
