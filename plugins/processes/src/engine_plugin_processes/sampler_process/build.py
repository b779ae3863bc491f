"""The build of a ``[rollout.process]`` engine in its worker process, with the plugin of this environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config import ModelConfig, RolloutConfig
from engine_core.contracts.engines import RolloutEngine, WorkerContext
from engine_core.local.engine_host import RankPlacement
from engine_plugin_processes import foreign_interpreter
from engine_plugin_processes.starting import same_tokenizer

if TYPE_CHECKING:
    from engine_core.plugins.plugin_set import PluginSet


def load(order: Mapping[str, Any]) -> tuple[PluginSet, type[RolloutEngine]]:
    """Load the plugin of an engine and its libraries, without the device; return the plugins and its class.

    Args:
        order: the command of ``SamplerEngine``.

    Raises:
        EngineError: the plugin does not load in this environment.
    """
    foreign_interpreter.compare(sys.executable, foreign_interpreter.versions(), order["versions"])
    if order["path"] is not None:
        sys.path[:] = order["path"]
    backend = order["rollout"]["backend"]
    where = (order["modules"], Path(order["root"]), order["allow_code"], order["other"])
    plugins = foreign_interpreter.load_backend(backend, *where, order["actor"], order["plugin_tables"])
    kind: type[RolloutEngine] = plugins.resolve("rollout_engines", backend)
    kind.load_libraries()
    return plugins, kind


def table(order: Mapping[str, Any], plugins: PluginSet) -> RolloutConfig:
    """Return the ``[rollout]`` table of the owner's command."""
    config = RolloutConfig.model_validate(order["rollout"])
    if order["steps_are_short"]:
        config.expect_updates()
    options = plugins.spec("rollout_engines", config.backend).config
    given = {"folder": Path(order["root"]), "allow_code": order["allow_code"]}
    config.options = options.model_validate_json(json.dumps(order["options"]), strict=True, context=given)
    return config


def build_host(order: Mapping[str, Any], plugins: PluginSet, kind: type[RolloutEngine]) -> Any:
    """Build the engine of the owner's command; return a host of it alone, as a ``Worker`` uses it.

    Args:
        order: the command of ``SamplerEngine``.
        plugins: of the run.
        kind: class of the engine.

    Raises:
        EngineError: the engine cannot be built.
    """
    config, device = table(order, plugins), torch.device(order["context"]["device"])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    model = ModelConfig.model_validate(order["model"])
    live = {"tokenizer": tokenizer_here(order["tokenizer"], model)} if order["tokenizer"] else {}
    context = WorkerContext(
        plugins=plugins, actor=order["actor"], live=live, **{**order["context"], "device": device}
    )
    torch.manual_seed(context.seed)
    kind.check_pool(config, context.role, 1)
    engine = kind(config, model, context)
    # decode texts of the run's model only: others may have other tokenizers
    known = live if context.role == "rollout" else {}
    return SimpleNamespace(
        config=SimpleNamespace(rollout=config),
        plugins=plugins,
        live=known,
        place=RankPlacement(device),
        engines={"rollout": engine},
        close=engine.close,
    )


def tokenizer_here(order: Sequence[str], model: ModelConfig) -> Any:
    """Load the run's tokenizer from the folder that the owner wrote.

    Args:
        order: the folder, and the tokenizer's hash.
        model: the ``[model]`` table.

    Raises:
        ConfigError: this environment loads another tokenizer from the folder.
    """
    import transformers

    folder, expected = order
    problem = (
        f"transformers {transformers.__version__} of {sys.executable} reads it as another tokenizer than the trainer's "
        f"does. Install the same version of transformers in both ({Path(sys.prefix)})."
    )
    return same_tokenizer(model.model_copy(update={"tokenizer": folder}), expected, problem)
