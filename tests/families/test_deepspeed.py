"""The train engine ``deepspeed`` computes the log-probs, gradients and adapters of every family on two ranks."""

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.families import TRAINS, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
globals().update(
    suites(
        TrainEngineSuite,
        TRAINS,
        module=__name__,
        marks=SCOREBOARD,
        backend="deepspeed",
        options={"param_persistence_threshold": 0},
        world_size=2,
    )
)
