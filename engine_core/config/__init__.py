"""TOML to typed config: the models of every table, and what reads, checks and writes them.

What plugins and the rest of the core name most; other tables stand in ``engine_core.config.models``.
"""

from engine_core.config.dump import dump_toml
from engine_core.config.models import (
    AlgorithmConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RoleConfig,
    RolloutConfig,
)

__all__ = [
    "AlgorithmConfig",
    "EngineConfig",
    "ModelConfig",
    "OptimConfig",
    "RoleConfig",
    "RolloutConfig",
    "dump_toml",
]
