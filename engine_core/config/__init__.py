"""TOML to typed config: the models of every table, and what reads, checks and writes them.

What plugins and the rest of the core name most; other tables stand in ``models`` and ``roles``.
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
