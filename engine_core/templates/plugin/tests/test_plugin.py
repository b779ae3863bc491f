from engine_plugin_template.plugin import few_words

from engine_core.plugins import PluginSet


def test_a_response_of_few_words_is_rewarded():
    assert few_words(["one two", "one two three"], max_words=2) == [1.0, 0.0]


def test_the_core_loads_the_reward_by_its_name():
    plugins = PluginSet.load({"rewards": ["template_reward"]})

    assert plugins.resolve("rewards", "template_reward") is few_words
    assert plugins.spec("rewards", "template_reward").config().max_words == 20
