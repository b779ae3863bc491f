"""A post-training engine for language models; every heavy part is an installable plugin.

Importing this package does not import torch: names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.hooks import hookimpl

if TYPE_CHECKING:
    from engine_core.cli.loading import load_trainer
    from engine_core.config.assemble import load_config
    from engine_core.train.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__", "hookimpl", "load_config", "load_trainer"]

_LAZY = {
    "load_config": "engine_core.config.assemble",
    "load_trainer": "engine_core.cli.loading",
    "Trainer": "engine_core.train.trainer",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'engine_core' has no attribute '{name}'")
