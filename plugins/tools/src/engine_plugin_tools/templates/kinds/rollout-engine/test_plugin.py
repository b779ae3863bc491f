"""The contracts that every rollout engine keeps: docs/reference/contracts.md of the engine."""

from engine_plugin_testing import RolloutEngineSuite


class TestTemplateName(RolloutEngineSuite):
    backend = "template_name"
