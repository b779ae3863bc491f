"""The benchmark of what Ray costs: its interval is right, and a run of it compares the same work."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "ray"


@pytest.fixture(scope="module")
def ratio():
    return runpy.run_path(str(FOLDER / "ratio.py"))["ratio"]


@pytest.fixture(scope="module")
def kind_of():
    return runpy.run_path(str(FOLDER / "session.py"))["kind_of"]


def test_rounds_with_the_same_ratio_leave_no_doubt(ratio):
    found = ratio([([1.0, 9.0, 2.0], [3.0, 2.2, 2.0]), ([4.0], [4.4])])  # medians 2 and 2.2
    assert [found[name] for name in ("ratio", "low", "high")] == pytest.approx([1.1] * 3)


def test_the_interval_is_students_over_the_logarithms_of_rounds(ratio):
    found = ratio([([1.0], [1.0]), ([1.0], [1.21])])
    half = 12.706 * math.log(1.21) / 2  # t of one degree, deviation ln(1.21) / sqrt(2), root of two rounds
    assert found["ratio"] == pytest.approx(1.1)
    assert math.log(found["high"]) == pytest.approx(math.log(1.1) + half)
    assert math.log(found["low"]) == pytest.approx(math.log(1.1) - half)


def test_one_round_has_no_interval(ratio):
    found = ratio([([1.0], [1.5])])
    assert (found["ratio"], found["low"], found["high"]) == (pytest.approx(1.5), None, None)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::Seat.served ", "workers"),
        ("/usr/bin/python -m engine_plugin_processes.worker 7 ", "workers"),
        ("/lib/ray/core/src/ray/raylet/raylet --raylet_socket_name=x ", "raylet"),
        ("/lib/ray/core/src/ray/gcs/gcs_server --log_dir=raylet ", "gcs_server"),
        ("/usr/bin/python /lib/ray/dashboard/dashboard.py ", "others"),
    ],
)
def test_processes_of_a_run_are_told_apart_by_their_commands(kind_of, command, kind):
    assert kind_of(command) == kind


@pytest.mark.slow
def test_both_runtimes_do_the_same_work_and_the_cpu_seconds_of_all_their_processes_are_counted(tmp_path):
    pytest.importorskip("ray")
    small = [
        "--rounds",
        "2",
        "--steps",
        "2",
        "--prompts",
        "2",
        "--response",
        "4",
        "--hidden",
        "32",
        "--turns",
        "steps",
    ]
    command = [sys.executable, str(FOLDER / "run.py"), *small, "--budget", "400", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "ray.json").read_text())
    assert found["failure"] == ""
    assert found["same_work"]
    assert len(found["wall"]["rounds"]) == 2
    for backend in ("torchrun", "ray"):
        assert [len(steps) for steps in found[backend]["steps"]] == [2, 2]
        assert found[backend]["cpu_seconds_of_a_step"]["workers"] > 0
