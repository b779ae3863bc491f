"""The observer is called as the engine calls it."""

from engine_core.plugins import PluginSet


def test_it_ends_a_run_above_its_bound_and_no_other():
    plugins = PluginSet.load({}, ["template_name"], tables={"template_name": {"reward": 0.5}})
    assert plugins.emit("run_started", 0, {"steps": 3, "earlier": []}) == []
    assert plugins.emit("step_finished", 1, {"metrics": {"reward/mean": 0.4}}) == []
    (reason,) = plugins.emit("step_finished", 2, {"metrics": {"reward/mean": 0.6}})
    assert "The reward is above 0.5." in reason
    assert plugins.observer_failures == 0
