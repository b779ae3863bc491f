"""``engine scale``: what it shows, writes and refuses."""

import json

import pytest

from engine_core.config import EngineConfig
from engine_core.runs.tracking import RunFolder
from engine_plugin_processes.scale_requests import FILE, ScaleRequests

POOLS = {
    "pools": {"train": 1, "serve": 1},
    "max_samplers": {"serve": 3},
    "actor": "train",
    "rollout": "serve",
}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """The folder of a run that goes on."""
    monkeypatch.chdir(tmp_path)
    made = []

    def folder(placement, backend="torchrun"):
        config = EngineConfig(placement=placement, run={"name": "r"})
        config.runtime.backend = backend
        made.append(RunFolder.create(config))
        return made[-1]

    yield folder
    for each in made:
        each.close()


def test_it_shows_what_is_wanted_there_and_allowed(engine, make):
    run = make(POOLS)
    assert (
        engine("scale", "r").out
        == "samplers: 1 requested, no step has reported yet how many run, at most 3\n"
    )
    line = {"step": 1, "sampling/samplers": 2.0}
    run.metrics_file.write_text(json.dumps(line) + "\n")
    assert engine("scale", "r", "3").out == "samplers: 3 requested, 2 running, at most 3\n"
    assert json.loads(engine("scale", "r", "--json").out) == {"requested": 3, "running": 2, "max": 3}
    assert ScaleRequests(run.path, 3).new() == 3
    assert [entry.name for entry in run.path.glob("*samplers*")] == [FILE]


@pytest.mark.parametrize("count", [0, 4, -1])
def test_a_number_out_of_the_range_is_refused(engine, make, count):
    run = make(POOLS)
    answer = engine("scale", "r", "--", count)
    assert answer.code == 2
    assert f"SAMPLERS: got {count}, expected 1 to 3 (placement.max_samplers.serve of " in answer.err
    assert not (run.path / FILE).exists()


def test_what_is_no_number_is_refused(engine, make):
    make(POOLS)
    assert engine("scale", "r", "many").code == 2


@pytest.mark.parametrize(
    ("placement", "way"),
    [
        ({}, "with a pool of the sampler's own in [placement]"),
        (POOLS | {"max_samplers": {}}, "as in --set placement.max_samplers.serve=4"),
    ],
)
def test_a_run_without_a_range_is_refused(engine, make, placement, way):
    run = make(placement)
    answer = engine("scale", "r", "2")
    assert answer.code == 2
    assert "placement.max_samplers: " in answer.err
    assert f"started or resumed, {way}." in answer.err
    assert not (run.path / FILE).exists()


@pytest.mark.parametrize("placement", [{}, POOLS])
def test_a_local_run_is_refused(engine, make, placement):
    make(placement, backend="local")
    answer = engine("scale", "r")
    assert answer.code == 2
    assert "runtime.backend = 'local'" in answer.err


def test_a_run_that_has_ended_is_refused_and_still_shown(engine, make):
    run = make(POOLS)
    run.close()
    answer = engine("scale", "r", "2")
    assert answer.code == 2
    assert "does not run" in answer.err
    assert "placement.pools.serve = 1" in answer.err
    assert not (run.path / FILE).exists()
    assert engine("scale", "r").code == 0


def test_a_run_that_has_ended_says_what_a_resume_makes_of_the_last_wish(engine, make):
    """It goes before placement.pools, also where --set has changed that."""
    run = make(POOLS)
    assert engine("scale", "r", "3").code == 0
    run.close()
    error = engine("scale", "r", "2").err
    assert "placement.pools.serve = 1 of them and has 3 from its first update of weights on" in " ".join(
        error.split()
    )
    assert "--set" not in error


def test_an_unknown_run_is_refused(engine, make):
    assert engine("scale", "nobody", "2").code == 4
