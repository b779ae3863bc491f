"""The contracts that every trainer keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import TrainerSuite


class TestTemplateName(TrainerSuite):
    name = "template_name"
    options = {"keep": 2}
    keys = {"rollout.group_size": 4, "rollout.max_response_tokens": 8}
