"""The plugin's registration. It imports neither torch nor DeepSpeed, since ``engine validate`` reads it."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_deepspeed.options import DeepSpeedOptions


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Return the train engine ``deepspeed``."""
    return {
        "deepspeed": TrainBackend(
            load="engine_plugin_deepspeed.engine:DeepSpeedEngine",
            config=DeepSpeedOptions,
            health="engine_plugin_deepspeed.library:health",
            families="engine_plugin_deepspeed.families:FAMILIES",
            capabilities=frozenset(
                {"common_checkpoints", "generation_module", "lora", "set_lr", "sleep", "support"}
            ),
            check_checkpoint="engine_plugin_torch.shards:check_experts",
            check_role="engine_plugin_torch.options:role_problems",
        )
    }
