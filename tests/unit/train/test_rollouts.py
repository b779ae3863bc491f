"""What an update of the sampler reports; sampling itself is in tests/integration."""

from types import SimpleNamespace

from engine_core.contracts.weight_sync import SyncResult
from engine_core.specs import Environment
from engine_core.train.rollouts import RolloutSource
from engine_core.train.source_rows import environment_tools


def test_the_switch_is_the_update_and_all_memory_handed_over_since_the_last_one():
    pushed = iter([SyncResult(1, 8, 0.25, ""), SyncResult(2, 8, 0.5, "")])
    runtime = SimpleNamespace(
        traded_seconds=3.0, push_weights=lambda *_: next(pushed), loss_metrics=lambda: {"sampling/lost": 0.0}
    )
    source = RolloutSource.__new__(RolloutSource)
    source.run = SimpleNamespace(runtime=runtime, emit=lambda *_: None, folder=None)
    source.version, source._traded = 0, 1.0
    assert source.sync()["time/offload_and_sync"] == 2.0 + 0.25
    runtime.traded_seconds = 7.0
    assert source.sync()["time/offload_and_sync"] == 4.0 + 0.5


def test_the_tools_of_the_environment_are_those_that_it_declares():
    tool = {"type": "function", "function": {"name": "add"}}
    spec = Environment(load=print, tools=(tool,))
    plugins = SimpleNamespace(spec=lambda kind, name: {("environments", "maths"): spec}[kind, name])
    config = SimpleNamespace(environment=SimpleNamespace(name="maths"))
    assert environment_tools(SimpleNamespace(config=config, plugins=plugins)) == (tool,)
    config.environment = None
    assert environment_tools(SimpleNamespace(config=config, plugins=plugins)) == ()
