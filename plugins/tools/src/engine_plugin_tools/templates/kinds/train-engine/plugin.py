"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import TrainBackend
from engine_plugin_torch.options import TorchOptions


class TemplateOptions(TorchOptions):
    """``[actor.template_name]``: checked when the run file is read, shown by ``engine schema``."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the last step that is added to the next."""


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Offer the engine; the text is imported in the worker."""
    able = frozenset({"generation_module"})
    load = "engine_plugin_template.engine:TemplateName"
    return {"template_name": TrainBackend(load=load, config=TemplateOptions, capabilities=able)}
