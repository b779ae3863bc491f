"""The contracts that every environment keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import EnvironmentSuite


class TestTemplateName(EnvironmentSuite):
    name = "template_name"
    options = {"again": "?"}
