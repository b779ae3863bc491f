"""The contracts that every policy loss keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import LossSuite


class TestTemplateName(LossSuite):
    name = "template_name"
    options = {"strength": 0.5}
    examples = [
        ((-1.0, -1.0, 2.0), -2.0),
        ((-1.0, -1.2, 0.0), 0.01),
    ]  # log-prob, old log-prob, advantage; loss
