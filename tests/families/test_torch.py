"""The train engine ``torch`` computes the log-probs, gradients and adapters of every family."""

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.families import TRAINS, suites

globals().update(
    suites(
        TrainEngineSuite,
        TRAINS,
        module=__name__,
        fast=("falcon_h1", "gpt_oss"),
        backend="torch",
        options={"log_prob_chunk_tokens": 64},
    )
)
