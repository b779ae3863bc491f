"""Building the engine in its own process: the plugin from this environment, its table checked here."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.data import load_tokenizer, tokenizer_hash
from engine_core.errors import ConfigError
from engine_plugin_processes.foreign_interpreter import load_backend

if TYPE_CHECKING:
    import torch

    from engine_core.contracts.engines import RolloutEngine


def build_engine(order: Mapping[str, Any], device: torch.device) -> RolloutEngine:
    """The engine that the owner asks for.

    Args:
        order: its message ``start``.
        device: of this process.

    Raises:
        EngineError: the plugin cannot be had here, or the engine refuses.
    """
    root = Path(order["root"])
    config = RolloutConfig.model_validate(order["rollout"])
    if order["steps_are_short"]:
        config.expect_updates()
    where = (order["modules"], root, order["allow_code"], order["other"])
    plugins = load_backend(config.backend, *where, order["actor"])
    table = plugins.spec("rollout_engines", config.backend).config
    given = {"folder": root, "allow_code": order["allow_code"]}
    config.options = table.model_validate_json(json.dumps(order["options"]), strict=True, context=given)
    model = ModelConfig.model_validate(order["model"])
    context = WorkerContext(
        plugins=plugins,
        role=order["context"]["role"],
        device=device,
        seed=order["context"]["seed"],
        total_steps=order["context"]["total_steps"],
        deterministic=order["context"]["deterministic"],
        actor=order["actor"],
        live={"tokenizer": tokenizer_here(order["tokenizer"], model)} if order["tokenizer"] else {},
    )
    import torch

    torch.manual_seed(context.seed)
    engine: RolloutEngine = plugins.resolve("rollout_engines", config.backend)(config, model, context)
    return engine


def tokenizer_here(told: Sequence[str], model: ModelConfig) -> Any:
    """The run's tokenizer, from the folder that the owner wrote.

    Args:
        told: the folder, and the tokenizer's hash.
        model: the table that says how it is loaded.

    Raises:
        ConfigError: it is another one here.
    """
    folder, expected = told
    found = load_tokenizer(model.model_copy(update={"tokenizer": folder}))
    if tokenizer_hash(found) != expected:
        import transformers

        raise ConfigError(
            f"model.tokenizer: transformers {transformers.__version__} of {sys.executable} reads it as another tokenizer than "
            f"the trainer's does. Install the same version of transformers in both ({Path(sys.prefix)})."
        )
    return found
