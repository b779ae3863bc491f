"""The curves of the demo by backend: what is said of them, and that each of their runs is a valid one."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core import load_config

CURVES = Path(__file__).parents[2] / "benchmarks" / "curves"


@pytest.fixture(scope="module")
def backends():
    before = list(sys.path)
    sys.path.insert(0, str(CURVES))
    try:
        yield SimpleNamespace(**runpy.run_path(str(CURVES / "backends.py")))
    finally:
        sys.path[:] = before


def test_ends_overlap_or_not_and_gaps_are_means_over_evaluations(backends):
    low = {0: [(0, 0.1), (5, 0.3), (10, 0.5)], 1: [(0, 0.1), (5, 0.5), (10, 0.7)]}
    near = {0: [(0, 0.1), (5, 0.3), (10, 0.6)], 1: [(0, 0.1), (5, 0.5), (10, 0.8)]}
    far = {0: [(0, 0.1), (5, 0.3), (10, 0.9)], 1: [(0, 0.1), (5, 0.5), (10, 1.0)]}
    told = "\n".join(backends.overlap({"torch": low, "near": near, "far": far}, 400))
    assert "| torch | 2 | 0.600 ± 0.141 | 0.500 to 0.700 |" in told
    assert "Gap between torch and near of one seed: 0.050; their ends overlap from 0.600 to 0.700." in told
    assert "Gap between torch and far of one seed: 0.175; their ends do not overlap." in told
    assert "Gap between two seeds of one backend, mean over evaluations: 0.183." in told
    assert "An accuracy of 0.75 over 400 rows is uncertain by 0.022." in told


def test_each_backend_runs_the_same_file_in_its_own_processes(backends):
    file = CURVES.parents[1] / "examples" / "word_problems" / "grpo.toml"
    for name, words in backends.BACKENDS.items():
        config = load_config(file, overrides=[*words])
        assert config.actor.backend == name
        assert config.runtime.backend == ("local" if name == "torch" else "torchrun")
        assert name == "torch" or config.runtime.options.processes == 2


def test_a_picture_is_drawn(backends, tmp_path):
    backends.plot({"torch": {0: [(0, 0.1), (5, 0.3)]}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
