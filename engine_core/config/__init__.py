"""The typed config of a run: models of all TOML tables, and the code that reads, checks and writes them.

This package exports the most used names. The other tables are in ``models`` and ``roles``.
"""

from engine_core.config.dump import dump_toml
from engine_core.config.models import AlgorithmConfig, EngineConfig
from engine_core.config.roles import ModelConfig, OptimConfig, RoleConfig, RolloutConfig

__all__ = [
    "AlgorithmConfig",
    "EngineConfig",
    "ModelConfig",
    "OptimConfig",
    "RoleConfig",
    "RolloutConfig",
    "dump_toml",
]
