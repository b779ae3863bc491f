"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core import hookimpl
from engine_core.specs import RolloutBackend


@hookimpl
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    """Offer the sampler; the text is imported in the worker. It samples from all tokens."""
    options = frozenset({"temperature", "max_response_tokens", "stop", "stop_token_ids"})
    load = "engine_plugin_template.engine:TemplateName"
    return {"template_name": RolloutBackend(load=load, sampling=options)}
