"""What an update of the sampler reports; sampling itself is in tests/integration."""

from types import SimpleNamespace

from engine_core.contracts.weight_sync import SyncResult
from engine_core.specs import Environment
from engine_core.train import sampled_run
from engine_core.train.sampled_run import SampledRun


class Run(SampledRun):
    def step(self, step):
        return {}


def test_the_switch_is_the_update_and_all_memory_handed_over_since_the_last_one():
    pushed = iter([SyncResult(1, 8, 0.25, ""), SyncResult(2, 8, 0.5, "")])
    run = Run.__new__(Run)
    run.runtime = SimpleNamespace(
        traded_seconds=3.0, push_weights=lambda *_: next(pushed), loss_metrics=lambda: {"sampling/lost": 0.0}
    )
    run.emit = lambda *_: None
    run.version, run._traded = 0, 1.0
    assert run.push_weights(updated=True)["time/offload_and_sync"] == 2.0 + 0.25
    run.runtime.traded_seconds = 7.0
    assert run.push_weights(updated=True)["time/offload_and_sync"] == 4.0 + 0.5


def test_the_tools_of_the_environment_are_those_that_it_declares(monkeypatch):
    monkeypatch.setattr(sampled_run, "PromptSource", lambda *arguments: arguments[-1])
    tool = {"type": "function", "function": {"name": "add"}}
    spec = Environment(load=print, tools=(tool,))
    run = Run.__new__(Run)
    run.tokenizer, run.text_config = None, None
    run.plugins = SimpleNamespace(spec=lambda kind, name: {("environments", "maths"): spec}[kind, name])
    run.config = SimpleNamespace(
        environment=SimpleNamespace(name="maths"),
        rollout=SimpleNamespace(options=None),
        run=SimpleNamespace(seed=0),
    )
    assert run.source_of("train", None, None) == (tool,)
    run.config.environment = None
    assert run.source_of("train", None, None) == ()
