"""The curves of the demo by backend: what is said of them, and that each of their runs is a valid one."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core import load_config
from engine_plugin_tools.scaffold import TEMPLATES

CURVES = Path(__file__).parents[2] / "benchmarks" / "curves"


def _script(name):
    before = list(sys.path)
    sys.path.insert(0, str(CURVES))
    try:
        return SimpleNamespace(**runpy.run_path(str(CURVES / f"{name}.py")))
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def backends():
    return _script("backends")


@pytest.fixture(scope="module")
def ahead():
    return _script("ahead")


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
    file = TEMPLATES / "demo" / "grpo.toml"
    for name, words in backends.BACKENDS.items():
        config = load_config(file, overrides=[*words])
        assert config.actor.backend == name
        assert config.runtime.backend == ("local" if name == "torch" else "torchrun")
        assert name == "torch" or config.runtime.options.processes == 2


@pytest.mark.parametrize(
    ("found", "two", "one"),
    [
        ([], ["", "", ""], ["", "", ""]),
        (["0"], ["0", "0", "0"], ["0", "0", "0"]),
        (["4", "7"], ["4,7", "4,7", "4,7"], ["4", "7", "4"]),
        (["0", "1", "2", "3"], ["0,1", "2,3", "0,1"], ["0", "2", "1"]),
    ],
)
def test_runs_of_two_processes_have_a_pair_of_gpus_and_runs_of_one_take_turns(backends, found, two, one):
    assert [backends.devices_of(slot, 2, found) for slot in range(3)] == two
    assert [backends.devices_of(slot, 1, found) for slot in range(3)] == one


def test_a_run_that_fails_is_told_with_the_end_of_its_log_and_the_others_go_on(
    backends, tmp_path, monkeypatch
):
    """Every run fails here: there is no warm start. Each is told, and nothing is kept of them."""
    given = SimpleNamespace(jobs=2, steps=1, evals=1, run_seconds=120.0)
    found = {"runs": {"torch-7": [[0, 0.5]]}, "seconds": {}}
    told = backends.run_all(tmp_path, [("torch", 0), ("torch", 1), ("torch", 7)], found, given)
    assert [line.split()[0] for line in told[::2]] == ["torch-0", "torch-1"] or told[0].startswith("torch-1")
    assert len(told) == 4
    assert all("sft" in line for line in told[1::2])
    assert list(found["runs"]) == ["torch-7"]


def test_a_picture_is_drawn(backends, tmp_path):
    backends.plot({"torch": {0: [(0, 0.1), (5, 0.3)]}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_in_the_band_where_it_lies_between_the_others_or_within_their_error(ahead):
    band = [[(0, 0.1), (5, 0.30), (10, 0.50), (15, 0.6)], [(0, 0.1), (5, 0.40), (10, 0.55), (15, 0.6)]]
    one = [(0, 0.1), (5, 0.35), (10, 0.59), (15, 0.9)]  # within, just above, far above
    # of 400 rows 0.55 is uncertain by 1.96 * sqrt(0.55 * 0.45 / 400) = 0.049
    assert ahead.inside(band, one, 400) == (1, 2, 3)
    assert ahead.inside(band, one, 40_000) == (1, 1, 3)  # by 0.005


def test_a_run_in_turn_is_held_against_the_others_in_turn_alone(ahead):
    low, high, far = ([(0, 0.1), (5, value)] for value in (0.3, 0.4, 0.9))
    told = "\n".join(ahead.verdict({"in turn": {0: low, 1: high}, "ahead by 1": {0: low, 1: far}}, 10**9))
    assert "| in turn | 0 | 0.300 | 0 of 1 | 0 of 1 |" in told
    assert "| ahead by 1 | 0 | 0.300 | 1 of 1 | 1 of 1 |" in told
    assert "| ahead by 1 | 1 | 0.900 | 0 of 1 | 0 of 1 |" in told
    assert "ahead by 1: ends from 0.300 to 0.900." in told


def test_those_that_run_ahead_differ_from_those_in_turn_by_that_alone(ahead):
    file = TEMPLATES / "demo" / "grpo.toml"
    for name, words in ahead.VARIANTS.items():
        config = load_config(file, overrides=[*words, f"actor.optim.lr={ahead.LR}"])
        assert config.trainer == ("rl" if name == "in turn" else "async")
        assert name == "in turn" or config.options.max_staleness == int(name[-1])
        assert config.actor.optim.lr == 1.2e-4
