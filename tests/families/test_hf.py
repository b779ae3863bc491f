"""The rollout engine ``hf`` samples from every family."""

import pytest

from engine_plugin_testing import RolloutEngineSuite
from engine_plugin_testing.families import SAMPLES, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
globals().update(
    suites(
        RolloutEngineSuite,
        SAMPLES,
        module=__name__,
        marks=SCOREBOARD,
        fast=("lfm2", "gpt_oss"),
        backend="hf",
    )
)
