"""The plugin's registration, and the check of ``engine doctor``.

It imports neither torch nor megatron, since ``engine validate`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from engine_core import hookimpl
from engine_core.errors import EnvironmentProblem
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
            health="engine_plugin_megatron.plugin:health",
            families="engine_plugin_megatron.families:FAMILIES",
            capabilities=frozenset({"common_checkpoints", "set_lr", "sleep", "support"}),
            check_checkpoint="engine_plugin_torch.shards:check_experts_apart",
        )
    }


@hookimpl
def engine_architectures() -> Mapping[str, ModelArchitecture]:
    """Return the architectures of this plugin, by Hugging Face's ``model_type``."""
    here = "engine_plugin_megatron.models.architecture"
    return {
        "gemma": ModelArchitecture(load=f"{here}:Gemma"),
        "llama": ModelArchitecture(load=f"{here}:Architecture"),
        "mistral": ModelArchitecture(load=f"{here}:Architecture"),
        "mixtral": ModelArchitecture(load=f"{here}:Mixtral"),
        "qwen2": ModelArchitecture(load=f"{here}:Qwen2"),
        "qwen3": ModelArchitecture(load=f"{here}:Qwen3"),
        "qwen3_moe": ModelArchitecture(load=f"{here}:Qwen3Moe"),
        "seed_oss": ModelArchitecture(load=f"{here}:SeedOss"),
        "smollm3": ModelArchitecture(load=f"{here}:SmolLM3"),
    }


FASTER = {"transformer_engine": "Transformer Engine", "apex": "apex"}


def health() -> str:
    """Return one line: the version, the missing optional packages and what is lost without them.

    Raises:
        EnvironmentProblem: megatron-core is not installed, or there is no CUDA device.
    """
    import torch

    try:
        own = version("megatron-core")
    except PackageNotFoundError as error:
        raise EnvironmentProblem(
            "megatron-core is not installed. Try: pip install engine-plugin-megatron"
        ) from error
    missing = [name for module, name in FASTER.items() if find_spec(module) is None]
    without = f"; without {' and '.join(missing)}: AdamW is torch's, not fused" if missing else ""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(f"megatron-core {own}{without}; there is no CUDA device, which it needs")
    return f"megatron-core {own}{without}; {torch.cuda.device_count()} CUDA devices"
