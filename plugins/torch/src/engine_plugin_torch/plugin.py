"""The hooks of this distribution: the train engine ``torch``."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_torch.options import TorchOptions


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Offer the train engine ``torch``."""
    return {
        "torch": TrainBackend(
            load="engine_plugin_torch.engine:TorchEngine",
            config=TorchOptions,
            families="engine_plugin_torch.families:FAMILIES",
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
            health="engine_plugin_torch.precision:health",
        )
    }
