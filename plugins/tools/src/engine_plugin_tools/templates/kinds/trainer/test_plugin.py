"""The contracts that every trainer keeps: docs/reference/contracts.md of the engine."""

from engine_plugin_testing import TrainerSuite


class TestTemplateName(TrainerSuite):
    name = "template_name"
    options = {"keep": 2}
    keys = {"rollout.group_size": 4, "rollout.max_response_tokens": 8}
