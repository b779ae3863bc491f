"""The train engine ``deepspeed`` computes the log-probs, gradients and adapters of every family on two ranks."""

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.families import TRAINS, suites

globals().update(
    suites(
        TrainEngineSuite,
        TRAINS,
        module=__name__,
        fast=(),
        backend="deepspeed",
        options={"param_persistence_threshold": 0},
        world_size=2,
    )
)
