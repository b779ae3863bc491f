"""The profile of a process during a step."""

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import checkpoint

from engine_plugin_tools import profiler
from engine_plugin_tools.profiler import profiled


def test_a_context_that_fails_leaves_its_trace_too(tmp_path):
    def step():
        with profiled(tmp_path / "step", "rank_3"):
            torch.ones(3, 3) @ torch.ones(3, 3)
            raise MemoryError

    with pytest.raises(MemoryError):
        step()
    (file,) = (tmp_path / "step").iterdir()
    assert file.name == "rank_3.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


def test_with_cuda_the_memory_of_the_context_is_written_and_no_longer_recorded(tmp_path, monkeypatch):
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda file: calls.append(file))
    recorded = []

    def without_kernels(activities):
        recorded.extend(activities)
        return profile(activities=activities[:1])  # a build for CPUs records no others

    monkeypatch.setattr(profiler, "profile", without_kernels)
    with profiled(tmp_path, "rank_0"):
        assert calls == [{"max_entries": 100_000}]
        assert checkpoint._enable_checkpoint_early_stop is False  # the exception that it needs would be lost
    assert checkpoint._enable_checkpoint_early_stop is None
    assert calls[1:] == [str(tmp_path / "rank_0.memory.pickle"), {"enabled": None}]
    assert recorded == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
