"""The rollout engine ``hf`` samples from every family."""

from engine_plugin_testing import RolloutEngineSuite
from engine_plugin_testing.families import SAMPLES, suites

globals().update(
    suites(RolloutEngineSuite, SAMPLES, module=__name__, fast=("falcon_h1", "gpt_oss"), backend="hf")
)
