"""The table of model architectures: ``engine_architectures``, entry-point group ``engine.architectures``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.hooks import hookspec
from engine_core.specs import Spec


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture(Spec):
    """A model architecture: ``load`` names a function without arguments, or a class, that gives an ``Architecture``."""

    kind = "architectures"
    noun = "architecture"


SPECS = {"architectures": ModelArchitecture}


@hookspec
def engine_architectures() -> Mapping[str, ModelArchitecture]:
    """Offer architectures that the engine can build, for the ``model_type`` of a Hugging Face config.

    :returns: a ``ModelArchitecture`` for each name. Its ``load`` gives an ``engine_plugin_megatron.models.architecture.Architecture``,
        imported only in the workers that train such a model.

    Collects from all plugins; entry-point group ``engine.architectures``. Called once in every process. Not collective.
    """
