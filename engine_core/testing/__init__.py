"""The conformance kit: contracts that every plugin keeps, as pytest suites. See docs/conformance.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.testing.reward_suite import RewardSuite
    from engine_core.testing.rollout_suite import RolloutEngineSuite
    from engine_core.testing.train_suite import TrainEngineSuite

HOMES = {
    "TrainEngineSuite": "train_suite",
    "RolloutEngineSuite": "rollout_suite",
    "RewardSuite": "reward_suite",
}

__all__ = ["RewardSuite", "RolloutEngineSuite", "TrainEngineSuite"]


def __getattr__(name: str) -> Any:
    # On first use: the suite of rewards must not import torch, nor a worker pytest.
    if name in HOMES:
        return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
