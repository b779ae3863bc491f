"""The contracts that every environment keeps: the page Contracts of the documentation."""

from engine_plugin_testing import EnvironmentSuite


class TestTemplateName(EnvironmentSuite):
    name = "template_name"
    options = {"again": "?"}
