"""The train engine ``fsdp`` computes the log-probs, gradients and adapters of every family on two ranks."""

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
        backend="fsdp",
        options={"log_prob_chunk_tokens": 64},
        world_size=2,
    )
)
