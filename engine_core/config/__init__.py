"""TOML to typed config: the models of every table, and what reads, checks and writes them."""

from engine_core.config.dump import dump_toml, origins
from engine_core.config.models import (
    AlgorithmConfig,
    CheckpointConfig,
    ColumnsConfig,
    CorrectionConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    PlacementConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    RuntimeConfig,
    StageConfig,
    TrackingConfig,
)
from engine_core.config.schedule import changes, config_at

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ColumnsConfig",
    "CorrectionConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "ModelConfig",
    "OptimConfig",
    "PlacementConfig",
    "RewardConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "RuntimeConfig",
    "StageConfig",
    "TrackingConfig",
    "changes",
    "config_at",
    "dump_toml",
    "origins",
]
