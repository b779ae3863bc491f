"""The plugin's registration. It imports neither torch nor megatron, since ``engine validate`` reads it."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_megatron.options import MegatronOptions
from engine_plugin_megatron.tables import ModelArchitecture


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Return the train engine ``megatron``."""
    return {
        "megatron": TrainBackend(
            load="engine_plugin_megatron.engine:MegatronEngine",
            config=MegatronOptions,
            health="engine_plugin_megatron.health:health",
            capabilities=frozenset({"common_checkpoints", "set_lr", "sleep", "support"}),
        )
    }


@hookimpl
def engine_architectures() -> Mapping[str, ModelArchitecture]:
    """Return the architectures of this plugin, by Hugging Face's ``model_type``."""
    here = "engine_plugin_megatron.models.architecture"
    return {
        "llama": ModelArchitecture(load=f"{here}:Architecture"),
        "qwen2": ModelArchitecture(load=f"{here}:Qwen2"),
        "qwen3": ModelArchitecture(load=f"{here}:Qwen3"),
        "qwen3_moe": ModelArchitecture(load=f"{here}:Qwen3Moe"),
    }
