"""The hooks and options of this distribution (no torch here, because ``engine validate`` reads it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import Options, RolloutBackend


class HFOptions(Options):
    """``[rollout.hf]``: options of the rollout engine `hf`."""

    batch_size: int = Field(default=256, gt=0)
    """Maximum number of sequences sampled at the same time. A larger batch is faster until memory or the cores are full."""
    tokens_per_step: int = Field(default=16, gt=0)
    """Number of tokens that the sampler generates for each sequence before it checks for timeouts and weight updates. The key has an effect only if the run may stop unfinished responses (`rollout.request_timeout_seconds`, `rollout.over_sampling`) or change weights during sampling (`async.weight_updates` other than ``drain``)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights if the sampler has a separate model."""
    adapter: bool = False
    """In a run with ``[actor.lora]`` whose sampler has a separate model: the sampler keeps the base model, and each update sends only the adapter instead of merged weights. Needs the package peft."""


@hookimpl
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    """Offer the rollout engine ``hf``."""
    return {
        "hf": RolloutBackend(
            load="engine_plugin_hf_rollout.engine:HFRolloutEngine",
            config=HFOptions,
            families="engine_plugin_hf_rollout.families:FAMILIES",
            capabilities=frozenset({"share_module", "custom_model", "pause", "sleep", "support", "partial"}),
        )
    }
