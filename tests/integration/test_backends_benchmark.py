"""The comparison of train backends: what is said of its rows, and that a case which fails does not end the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "backends"


@pytest.fixture
def modules(monkeypatch):
    """``cases`` and ``tables`` of the folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import cases
    import tables

    yield cases, tables
    for name in ("cases", "tables"):
        del sys.modules[name]


def row(name, loss, norm, types="fp32", **more):
    found = {"case": name, "model": "tiny", "types": types, "losses": [loss, loss], "grad_norms": [norm]}
    return {**found, "peak_gib": 1.0, "micro_batches": 2, "build_s": 1.0, "first_step_s": 1.0, **more}


def test_who_lies_beyond_the_tolerance_is_named_with_the_difference(modules):
    rows = [
        row("one", 6.0, 2.0),
        row("near", 6.00001, 2.0),
        row("far", 6.0, 2.1),
        row("half", 6.01, 2.0, "bf16"),
    ]
    rows.append({"case": "lost", "model": "tiny", "types": "fp32", "error": "out of memory"})
    told = modules[1].verdicts(rows)
    assert told[0] == (
        "tiny fp32: 3 cases against 'one' within loss 1e-05, norm 1e-05: beyond: far (norm 5.0e-02)"
    )
    assert told[1].endswith("against 'half' within loss 0.002, norm 0.02: all")
    assert told[2] == "did not run: lost"
    table = modules[1].table(rows)
    assert "| lost | out of memory |" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_a_norm_that_is_not_a_number_is_beyond(modules):
    told = modules[1].verdicts([row("one", 6.0, 2.0), row("broken", float("nan"), 2.0)])
    assert "beyond: broken (loss nan)" in told[0]


@pytest.mark.parametrize("gpus", [2, 4])
def test_cases_of_a_set_have_names_of_their_own_and_batches_that_their_ranks_can_share(modules, gpus):
    for name, make in modules[0].SETS.items():
        cases = make(gpus)
        names = [case["name"] for case in cases]
        assert len(set(names)) == len(names), name
        for case in cases:
            assert len(case["lengths"]) % gpus == 0
            assert max(case["lengths"]) <= (case["budget"] or sum(case["lengths"]))


@pytest.mark.slow
def test_after_a_case_that_fails_the_others_are_measured_in_new_processes(tmp_path):
    """The first case asks for a layout that two ranks cannot have."""
    script = (
        "import sys; sys.path.insert(0, 'benchmarks/backends'); import cases, run\n"
        "def broken(world):\n"
        "    found = [c for c in cases.tiny(world) if c['name'] in ('FSDP full fp32', 'DDP fp32')]\n"
        "    found[0]['options']['param_dtype'] = 'fp7'\n"
        "    return found\n"
        "run.SETS['tiny'] = broken\n"
        "run.main()\n"
    )
    out = tmp_path / "rows.json"
    words = ["--set", "tiny", "--gpus", "2", "--device", "cpu", "--budget", "400", "--case-seconds", "150"]
    subprocess.run(
        [sys.executable, "-c", script, *words, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=450,
        check=True,
    )
    first, second = json.loads(out.read_text())
    assert first["case"] == "DDP fp32"
    assert "rank 0: ConfigError" in first["error"]
    assert second["case"] == "FSDP full fp32"
    assert second["losses"][0] > 0
