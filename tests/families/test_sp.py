"""The train engine ``fsdp`` shares the tokens of each pack between two ranks (``sp = 2``) for every family that attends."""

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.families import PASSES, RECURRENT, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
globals().update(
    suites(
        TrainEngineSuite,
        PASSES,
        module=__name__,
        marks=SCOREBOARD,
        gaps={
            **dict.fromkeys(RECURRENT, "the state of recurrent layers is not passed between ranks"),
            "gpt_oss": "attention `varlen` has no attention sinks",
        },
        backend="fsdp",
        options={"log_prob_chunk_tokens": 64, "sp": 2},
        world_size=2,
    )
)
