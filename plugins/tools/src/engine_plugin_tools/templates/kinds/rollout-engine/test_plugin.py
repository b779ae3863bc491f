"""The contracts that every rollout engine keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import RolloutEngineSuite


class TestTemplateName(RolloutEngineSuite):
    backend = "template_name"
