"""Read what a run's backends declare about the type of its models: tested, known to differ, or not tested.

A backend's spec has ``families``. The type is read from a config on this machine; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import OPTIONAL_ROLES
from engine_core.errors import nearest
from engine_core.specs import RolloutBackend, TrainBackend, resolve

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig
    from engine_core.plugins.plugin_set import PluginSet


def declared_families(config: EngineConfig, plugins: PluginSet) -> Iterator[dict[str, Any]]:
    """Yield ``{role, backend, model_type, tested, message}`` for each role whose backend declares families.

    Args:
        config: a valid config; a role without a readable ``config.json`` is left out.
        plugins: the plugins of the run.
    """
    trained: Any = plugins.find(TrainBackend.kind, config.actor.backend)
    sampled = (
        () if getattr(trained, "own_model", False) else ("rollout",)
    )  # else of a model that is not the folder's
    for role in ("actor", *OPTIONAL_ROLES, *sampled):
        table = getattr(config, role)
        kind = RolloutBackend.kind if role == "rollout" else TrainBackend.kind
        spec: Any = plugins.find(kind, table.backend) if table else None
        families = resolve(spec.families) if spec and spec.families else {}
        types = _model_types(getattr(table, "path", None) or config.model.path) if families else []
        if types:
            model_type = next((each for each in types if each in families), types[0])
            note, models = families.get(model_type), f"models of type '{model_type}'"
            hint = nearest(model_type, [name for name, problem in families.items() if not problem])
            message = f"{models} with {table.backend}: {note}"
            if not note:
                tested = "are tested" if note == "" else "are not tested"
                message = f"{models} {tested} with {table.backend}"
            if note is None and hint:
                message += f"; nearest: '{hint}'"
            found = {"role": role, "backend": table.backend, "model_type": model_type}
            yield {**found, "tested": note == "", "message": message}


def _model_types(path: str) -> list[str]:
    """Return the types in the config of a folder, or of a hub's model in the local cache: of the whole and of its text model."""
    try:
        file: Any = Path(path) / "config.json"
        if not Path(path).is_dir():
            from huggingface_hub import try_to_load_from_cache  # takes most of a second

            file = try_to_load_from_cache(path, "config.json")
        found = json.loads(Path(file).read_text("utf-8"))
        types = [found["model_type"], (found.get("text_config") or {}).get("model_type")]
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return []
    return [each for each in types if isinstance(each, str)]
