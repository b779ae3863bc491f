"""Checks of the machine: what is found is named with what to do."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_core.runs import machine

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"


def test_a_small_shared_memory_is_named(tmp_path):
    found = machine.check_shared_memory(tmp_path, need=2**62)
    assert f"Shared memory: {tmp_path} has" in found
    assert "--shm-size" in found
    assert machine.check_shared_memory(tmp_path, need=1) is None
    assert machine.check_shared_memory(tmp_path / "absent", need=2**62) is None


def test_a_full_disk_is_named_also_under_a_folder_that_is_not_there_yet(tmp_path):
    found = machine.check_disk(tmp_path / "a" / "b", need=2**62)
    assert "are free under the run folder" in found
    assert "engine prune" in found
    assert machine.check_disk(tmp_path, need=1) is None


def in_process_with_limits(soft: int, hard: int) -> list[str]:
    code = (
        "import resource, sys; from engine_core.runs import machine\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "print(machine.raise_open_file_limit())\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS caps the limit by itself")
def test_the_soft_limit_of_open_files_becomes_the_hard_one():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 8192:
        pytest.skip(f"the hard limit of this machine is {hard}")
    assert in_process_with_limits(256, 8192) == ["None", "8192"]


def test_a_low_hard_limit_of_open_files_is_named():
    message, limit = in_process_with_limits(256, 512)
    assert limit == "512"
    assert message.startswith("Open files: the limit is 512 even after raising it")
    assert "nofile" in message


def test_the_start_says_everything_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "raise_open_file_limit", lambda: "A")
    monkeypatch.setattr(machine, "check_disk", lambda path: f"B {path}")
    monkeypatch.setattr(machine, "check_shared_memory", lambda: None)
    monkeypatch.setattr(machine, "TESTED", {"torch": "1.9", "transformers": "99.0"})
    *first, last = machine.check_start(tmp_path)
    assert first == ["A", f"B {tmp_path}"]
    assert last.startswith(
        f"torch {torch.__version__} is newer than 1.9, the newest release that was tested."
    )


@pytest.mark.parametrize(
    ("version", "newer"), [("2.11.0+cu130", False), ("2.13.9", False), ("2.14.0.dev1", True), ("3.0", True)]
)
def test_a_library_newer_than_what_was_tested_is_named_with_what_to_install(version, newer):
    found = machine.check_release("torch", version, "2.13")
    assert bool(found) is newer
    assert not newer or found == (
        f"torch {version} is newer than 2.13, the newest release that was tested. If the run fails, install a tested one: "
        "pip install 'torch==2.13.*'."
    )


def test_the_newest_tested_releases_are_those_of_this_environment():
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    assert {name: pinned[name].rpartition(".")[0] for name in machine.TESTED} == machine.TESTED


def test_memory_of_the_process_is_a_metric():
    code = (
        "from engine_core.runs import machine\n"
        "before = machine.memory_metrics()['memory/rss_gib']\n"
        "held = b'x' * (200 * 1024**2)\n"
        "print(machine.memory_metrics()['memory/rss_gib'] - before)"
    )
    # In the process of the tests, a collection of garbage can return memory between the two readings.
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(found) == pytest.approx(200 / 1024, abs=0.02)


class Accelerator:
    """torch.accelerator of a machine that has one."""

    def is_available(self):
        return True

    def memory_allocated(self):
        return 2 * 1024**3

    def memory_reserved(self):
        return 3 * 1024**3

    def max_memory_allocated(self):
        return 4 * 1024**3


def test_memory_of_an_accelerator_is_a_metric(monkeypatch):
    monkeypatch.setattr("torch.accelerator", Accelerator())
    metrics = machine.memory_metrics()
    assert (metrics["memory/allocated_gib"], metrics["memory/reserved_gib"], metrics["memory/peak_gib"]) == (
        2,
        3,
        4,
    )


def test_an_accelerator_without_statistics_gives_none(monkeypatch):
    class Silent(Accelerator):
        def memory_allocated(self):
            raise NotImplementedError

    monkeypatch.setattr("torch.accelerator", Silent())
    assert list(machine.memory_metrics()) == ["memory/rss_gib"]


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 6), ("250000 100000", 2), ("10000 100000", 1), ("900000 100000", 6), ("broken", 6)],
)
def test_usable_cores_are_those_of_the_process_within_its_group_s_share(monkeypatch, quota, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self: quota)
    assert machine.usable_cores() == cores


def test_without_control_groups_usable_cores_are_those_of_the_process(monkeypatch):
    def absent(self):
        raise FileNotFoundError

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3}, raising=False)
    monkeypatch.setattr(Path, "read_text", absent)
    assert machine.usable_cores() == 2
