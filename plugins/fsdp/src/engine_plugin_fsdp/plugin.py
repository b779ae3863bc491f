"""The hooks of this distribution (no torch here, because ``engine validate`` reads it)."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_fsdp.options import FSDPOptions


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Offer the train engine ``fsdp``."""
    return {
        "fsdp": TrainBackend(
            load="engine_plugin_fsdp.engine:FSDPEngine",
            config=FSDPOptions,
            families="engine_plugin_fsdp.families:FAMILIES",
            capabilities=frozenset(
                {
                    "common_checkpoints",
                    "generation_module",
                    "late_scale",
                    "lora",
                    "set_lr",
                    "sleep",
                    "support",
                }
            ),
            check_checkpoint="engine_plugin_torch.shards:check_experts",
            check_role="engine_plugin_torch.options:role_problems",
        )
    }
