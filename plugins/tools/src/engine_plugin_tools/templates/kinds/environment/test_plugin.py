"""The contracts that every environment keeps: docs/reference/contracts.md of the engine."""

from engine_plugin_testing import EnvironmentSuite


class TestTemplateName(EnvironmentSuite):
    name = "template_name"
    options = {"again": "?"}
