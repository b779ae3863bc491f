"""Many steps in one process leave nothing behind that grows: memory, objects, threads, processes, files."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from engine_core.runs.logs import LOGGERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def soak():
    """The module of ``benchmarks/soak/run.py``."""
    spec = importlib.util.spec_from_file_location("soak_run", ROOT / "benchmarks" / "soak" / "run.py")
    module = importlib.util.module_from_spec(spec)

    sys.modules["soak_run"] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak_run"]


@pytest.mark.parametrize(
    ("steps", "every"),
    [
        (150, 2),
        pytest.param(3000, 10, marks=[pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]),
    ],
)
def test_nothing_grows_with_the_number_of_steps(soak, tmp_path, monkeypatch, steps, every):
    for name in LOGGERS:  # pytest keeps every record that reaches the root: five objects a checkpoint
        monkeypatch.setattr(logging.getLogger(name), "propagate", False)
    samples = soak.soak(steps, tmp_path, every)
    assert len(samples) >= 60
    assert soak.leaks(samples) == []
    checkpoints = list((tmp_path / "runs" / "soak" / "checkpoints").iterdir())
    assert len(checkpoints) == soak.KEEP
    assert len((tmp_path / "runs" / "soak" / "metrics.jsonl").read_text().splitlines()) == steps


def test_each_sort_of_leak_is_found(soak):
    def samples(**leak):
        values = {"rss_mib": 400.0, "worker_rss_mib": 90.0, "objects": 500_000, "threads": 3, "children": 1}
        values |= {"open_files": 30, "checkpoints_kib": 300.0}
        return [
            soak.Sample(
                step=5 * i,
                folder_kib=leak.get("folder_kib", lambda i: 2.0 * i)(i),
                **{name: value + leak.get(name, lambda i: 0)(i) for name, value in values.items()},
            )
            for i in range(60)
        ]

    assert soak.leaks(samples()) == []
    for name in soak.BOUNDS:
        slow = {"objects": 2.5, "checkpoints_kib": 5.0}.get(name, 0.25)
        found = soak.leaks(samples(**{name: lambda i, slow=slow: int(slow * i) if slow > 2 else slow * i}))
        assert [line.split()[0] for line in found] == [name]
    assert "the run folder grows" in soak.leaks(samples(folder_kib=lambda i: 0.02 * i**3))[0]
