"""The contracts that every advantage estimator keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import AdvantageSuite


class TestTemplateName(AdvantageSuite):
    name = "template_name"
    options = {"quantile": 0.5}
    examples = [([[0.0, 1.0, 5.0], [2.0, 2.0]], [[-1.0, 0.0, 4.0], [0.0, 0.0]])]
