"""The contracts that every reward keeps: the page 'Contracts of the conformance kit'."""

from engine_plugin_testing import RewardSuite


class TestTemplateReward(RewardSuite):
    name = "template_reward"
    options = {"max_words": 2}
    examples = [("one two", 1.0), ("one two three", 0.0), ("", 1.0)]
