"""The contracts that every stage keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import StageSuite


class TestTemplateName(StageSuite):
    name = "template_name"
    options = {"times": 1}
    examples = [
        ([[0.0, 1.0], [1.0, 1.0]], [[0, 1], [0, 1]])
    ]  # rewards by group; what a new stage keeps of them
