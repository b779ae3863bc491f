"""The train engine ``torch`` computes the log-probs, gradients and adapters of every family."""

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
        fast=("lfm2", "gpt_oss"),
        backend="torch",
        options={"log_prob_chunk_tokens": 64},
    )
)
