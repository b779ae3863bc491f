"""Architectures of plugins in the processes that vLLM starts for ``tensor_parallel_size``.

vLLM calls ``register`` in each of them (entry-point group ``vllm.general_plugins``). The environment tells them what to
register, because they are new interpreters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import WorkerContext

VARIABLE = "ENGINE_VLLM_ARCHITECTURE"


@contextmanager
def registered_in_workers(
    config: RolloutConfig, model_config: ModelConfig, context: WorkerContext
) -> Iterator[None]:
    """Have each process that vLLM starts meanwhile call the hook ``engine_register_model``, as this process has.

    Args:
        config: ``[rollout]``.
        model_config: ``[model]``.
        context: of the sampler; with the plugins of the run.
    """
    plugins = context.plugins
    backends = [("rollout_engines", config.backend), ("train_engines", context.actor)]
    order = {
        "owner": os.getpid(),
        "modules": list(plugins.modules),
        "root": str(plugins.root.resolve()),
        "allow_code": plugins.allow_code,
        "backends": [backend for backend in backends if backend in plugins.chosen],
        "model": model_config.model_dump(mode="json"),
        "options": {}
        if config.options is None
        else config.options.model_dump(mode="json", exclude_none=True),
    }
    os.environ[VARIABLE] = json.dumps(order)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def register() -> None:
    """Register the architecture of the run's plugins in a process that vLLM has started for it; else do nothing."""
    order = json.loads(os.environ.get(VARIABLE, "null"))
    if order is None or order["owner"] == os.getpid():
        return
    from engine_core.config.roles import ModelConfig
    from engine_core.plugins.plugin_set import PluginSet

    backends = [(kind, name) for kind, name in order["backends"]]
    plugins = PluginSet.load(
        {kind: {name} for kind, name in backends}, order["modules"], Path(order["root"]), order["allow_code"]
    )
    options = plugins.spec(*backends[0]).config
    plugins.step("rollout", *backends).engine_register_model(
        sampler=backends[0][1],
        model_config=ModelConfig.model_validate(order["model"]),
        options=options and options.model_validate_json(json.dumps(order["options"]), strict=True),
    )
