"""What an update of the sampler tells; sampling itself is in tests/integration."""

from types import SimpleNamespace

from engine_core.sampler_wishes import write_wish
from engine_core.trainers.sampling import RolloutSource
from engine_core.weight_sync import SyncResult


def test_the_switch_is_the_update_and_all_memory_handed_over_since_the_last_one():
    pushed = iter([SyncResult(1, 8, 0.25, ""), SyncResult(2, 8, 0.5, "")])
    runtime = SimpleNamespace(
        traded_seconds=3.0, push_weights=lambda *_: next(pushed), loss_metrics=lambda: {"sampling/lost": 0.0}, most_samplers=0
    )  # fmt: skip
    source = RolloutSource.__new__(RolloutSource)
    source.run = SimpleNamespace(runtime=runtime, emit=lambda *_: None)
    source.version, source._traded = 0, 1.0
    assert source.sync()["time/switch"] == 2.0 + 0.25
    runtime.traded_seconds = 7.0
    assert source.sync()["time/switch"] == 4.0 + 0.5


def test_an_update_tells_the_runtime_once_of_how_many_samplers_somebody_wants(tmp_path):
    told = []
    runtime = SimpleNamespace(
        traded_seconds=0.0, push_weights=lambda *_: SyncResult(1, 8, 0.25, ""), loss_metrics=dict, most_samplers=3,
        want_samplers=told.append,
    )  # fmt: skip
    source = RolloutSource.__new__(RolloutSource)
    source.run = SimpleNamespace(runtime=runtime, emit=lambda *_: None, folder=None)
    source.version, source._traded, source._wishes = 0, 0.0, None
    source.sync()  # an evaluation has no folder
    source.run.folder = SimpleNamespace(path=tmp_path)
    source.sync()
    write_wish(tmp_path, 3)
    source.sync()
    source.sync()
    write_wish(tmp_path, 1)
    source.sync()
    assert told == [3, 1]
