"""The device memory of a sampler: its parts and the transitions between their states.

::

    weights   resident --sleep--> on the host --wake--> resident          (level 1)
              resident --sleep--> lost --wake--> blank --update--> resident  (level 2)
    kv_cache  resident --sleep--> released --wake--> resident

Level 0 keeps everything in place, as on a CPU. The engine is then asleep in name only: it neither samples nor takes
weights, so that the same run file behaves in the same way everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from engine_core.errors import DataError, did_you_mean
from engine_plugin_vllm_rollout import versions

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

PARTS = ("weights", "kv_cache")

log = logging.getLogger("engine")


class Memory:
    """The memory states of one engine.

    Args:
        engine: vLLM's engine.
        level: ``[rollout.vllm] sleep_level``; 0 if the device cannot sleep.
    """

    def __init__(self, engine: LLMEngine, level: int) -> None:
        self._engine, self._level = engine, level
        self._asleep: set[str] = set()  # parts that the caller put to sleep
        self._freed: set[str] = set()  # parts whose device memory vLLM has given back
        self.weights: Literal["resident", "blank"] = "resident"

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Give back the parts that are not kept. At level 2 the weights too: the next update brings them."""
        _check_parts(keep)
        wanted = set(PARTS) - set(keep) - self._asleep
        if not wanted:
            return
        start = time.perf_counter()
        self._asleep |= wanted
        if self._level:
            self._free(keep_weights="weights" not in self._asleep)
        log.debug("vLLM gave back %s in %.3f s.", sorted(self._freed), time.perf_counter() - start)

    def _free(self, keep_weights: bool) -> None:
        """Free the memory of what sleeps. vLLM frees the KV cache with whatever it frees."""
        if "kv_cache" not in self._asleep and not keep_weights:
            return  # the weights alone: they go with the cache
        if keep_weights and self._level == 1:
            if versions.release_kv_cache(self._engine):
                self._freed = {"kv_cache"}
                return
            self._engine.sleep(level=1, mode="keep")
            self._engine.wake_up(["weights"])
            self._freed = {"kv_cache"}
            return
        if self._freed:  # vLLM goes to sleep from the waking state alone
            self._engine.wake_up(sorted(self._freed))
        self._engine.sleep(level=self._level, mode="keep")
        self._freed = set(PARTS)
        if self._level == 2:
            self.weights = "blank"

    def wake(self, only: Sequence[str] | None = None) -> None:
        """Take these parts again; default: all."""
        _check_parts(only or ())
        parts = set(PARTS if only is None else only)
        start = time.perf_counter()
        self._asleep -= parts
        self._take(parts)
        log.debug("vLLM took back %s in %.3f s.", sorted(parts), time.perf_counter() - start)

    def _take(self, parts: set[str]) -> None:
        for part in PARTS:  # weights first: an update between the two finds the room of the cache free
            if part in parts & self._freed:
                self._engine.wake_up([part])
                self._freed.discard(part)

    def before_update(self) -> None:
        """Make room for new weights.

        Raises:
            RuntimeError: they sleep.
        """
        if "weights" in self._asleep:
            raise RuntimeError("The sampler is asleep: its weights cannot be updated. Call wake() first.")
        self._take({"weights"})

    def after_update(self) -> None:
        """All weights are new."""
        self.weights = "resident"

    def before_sampling(self) -> None:
        """Refuse to sample without weights or cache.

        Raises:
            RuntimeError: a part sleeps.
            DataError: the weights were released and have not been sent again.
        """
        if self._asleep:
            raise RuntimeError("The sampler is asleep; call wake() first.")
        if self.weights == "blank":
            raise DataError(
                "The sampler gave its weights up (rollout.vllm.sleep_level = 2) and no update came since. Update them, or "
                "set sleep_level = 1, which keeps them on the host."
            )


def _check_parts(parts: Sequence[str]) -> None:
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"Unknown part '{part}' of a sampler." + did_you_mean(part, PARTS))
