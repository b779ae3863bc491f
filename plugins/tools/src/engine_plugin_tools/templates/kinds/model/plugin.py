"""A model of our own for every role: ``engine plugins`` shows this line.

Keep this module light: a run imports it before any model is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from engine_core.config import ModelConfig


@hookimpl
def engine_build_model(role: str, model_config: ModelConfig) -> nn.Module:
    """Build the model of a role; the train engine places it, shards it and builds its optimizer."""
    from engine_plugin_template.model import build

    values = role in ("critic", "reward_model")
    return build(str(model_config.path), model_config.override, model_config.seed, values)
