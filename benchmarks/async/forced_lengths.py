"""A plugin in one file: samplers whose responses have lengths of a long-tailed distribution, and a reward for them.

Random weights hardly ever sample the end token, so that a response is as long as it may be. Each request's
``max_response_tokens`` is replaced, in the sampler alone, by a lognormal draw from its id ``STEP:GROUP:INDEX`` and a seed: the same
response has the same length in every run, and nobody but the sampler knows it before it has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field

from engine_core import hookimpl
from engine_core.specs import Options, Reward, RolloutBackend
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_vllm_rollout.engine import VLLMRolloutEngine
from engine_plugin_vllm_rollout.plugin import VLLMOptions

if TYPE_CHECKING:
    from engine_core.types import Request, Rollout


class LengthOptions(Options):
    """What both tables have besides their engine's own keys. Lengths are in tokens of the response."""

    median: int = Field(300, gt=0)
    """Of the distribution."""
    p99: int = Field(4096, gt=0)
    """Its 99th percentile."""
    cap: int = Field(8192, gt=0)
    """A longer draw becomes this."""
    length_seed: int = 0
    """Another gives every response another length."""
    short_steps: int = Field(0, ge=0)
    """In so many first steps the cap is `short_cap`: to warm up without waiting for a tail."""
    short_cap: int = Field(64, gt=0)
    """Of these steps."""


def length_of(request_id: str, options: LengthOptions) -> int:
    """Tokens of the response to a request."""
    spread = math.log(options.p99 / options.median) / statistics.NormalDist().inv_cdf(0.99)
    drawn = random.Random(f"{options.length_seed}:{request_id}").lognormvariate(
        math.log(options.median), spread
    )
    step = int(request_id.partition(":")[0])
    cap = min(options.cap, options.short_cap) if step <= options.short_steps else options.cap
    return min(max(round(drawn), 1), cap)


class _Forced:
    """Before an engine: requests with lengths of their own."""

    options: Any

    def add(self, requests: Sequence[Request]) -> None:
        found = []
        for request in requests:
            most = min(length_of(request.id, self.options), request.sampling.max_response_tokens)
            sampling = dataclasses.replace(request.sampling, max_response_tokens=most)
            found.append(dataclasses.replace(request, sampling=sampling))
        super().add(found)  # type: ignore[misc]


class ForcedVLLM(_Forced, VLLMRolloutEngine):
    """``vllm`` with forced lengths."""


class ForcedHF(_Forced, HFRolloutEngine):
    """``hf`` with forced lengths, and with the pace of a sampler on a device for itself."""

    def step(self) -> list[Rollout]:
        start = time.monotonic()
        found = super().step()
        tokens = self._steps or max((rollout.response_length for rollout in found), default=0)
        time.sleep(max(0.0, self.options.token_ms / 1000 * tokens - (time.monotonic() - start)))
        return found


class ForcedVLLMOptions(VLLMOptions, LengthOptions):
    """``[rollout.forced_vllm]``"""

    model_config = ConfigDict(extra="allow")  # vLLM's own options, as ``[rollout.vllm]``


class ForcedHFOptions(HFOptions, LengthOptions):
    """``[rollout.forced_hf]``"""

    token_ms: float = Field(0.0, ge=0)
    """Least time for a token of all sequences, in milliseconds; the rest of it is slept."""


def coin(completion: str) -> float:
    """0 or 1: random weights learn nothing, any reward that differs within a group will do."""
    return float(hashlib.blake2b(completion.encode()).digest()[0] % 2)


@hookimpl
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    can = frozenset({"pause", "sleep", "support", "partial"})
    return {
        "forced_vllm": RolloutBackend(load=ForcedVLLM, config=ForcedVLLMOptions, capabilities=can),
        "forced_hf": RolloutBackend(load=ForcedHF, config=ForcedHFOptions, capabilities=can),
    }


@hookimpl
def engine_rewards() -> Mapping[str, Reward]:
    return {"coin": Reward(load=coin)}
