"""What a run of the kit leaves written, as pytest in a process of its own does it."""

import datetime
import json
import platform
import subprocess

import pytest
import torch

from engine_plugin_testing import RewardSuite

pytest_plugins = ["pytester"]
SKIPPED, WRONG = "test_very_long_text_gets_a_value", "test_values_are_right"
SUITE = f"""
from engine_plugin_testing import RewardSuite

class TestShort(RewardSuite):
    name = "length"
    options = {{"max_tokens": 4, "buffer_tokens": 2}}
    examples = [({{"response_length": 2}}, 0.5)]
    unsupported = {{"{SKIPPED}": "it asks a server"}}

    def test_something_else(self):
        pass
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def of(*arguments):
        pytester.makepyfile(test_short=SUITE)
        words = (
            "-p",
            "engine_plugin_testing.recorder",
            "-p",
            "no:cacheprovider",
            "--record-contracts",
            "kept.json",
        )
        result = pytester.runpytest_inprocess(*words, *arguments, "test_short.py")
        return result, json.loads(file.read_text()) if (
            file := pytester.path / "kept.json"
        ).exists() else None

    return of


def test_an_entry_has_the_commit_that_is_checked_out(run, pytester):
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *words], cwd=pytester.path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=pytester.path, check=True, capture_output=True, text=True
    )
    _, record = run()
    assert record["test_short.py::TestShort"]["commit"] == head.stdout[:8]


def test_each_contract_of_a_class_is_written_with_its_outcome_the_day_and_the_versions(run):
    _, record = run()
    (key,) = record
    entry = record[key]
    assert key == "test_short.py::TestShort"
    assert (entry["name"], entry["options"]["max_tokens"], entry["world_size"]) == ("length", 4, 1)
    expected = dict.fromkeys(RewardSuite.contracts, "passed")
    assert entry["contracts"] == expected | {SKIPPED: "unsupported: it asks a server", WRONG: "failed"}
    assert (
        abs(datetime.datetime.now(datetime.UTC).date() - datetime.date.fromisoformat(entry["date"])).days <= 1
    )
    versions = entry["versions"]
    assert (versions["python"], versions["torch"]) == (platform.python_version(), torch.__version__)
    assert {"engine-core-rl", "engine-plugin-rewards"} <= versions.keys()

    result, after = run("-k", SKIPPED)
    result.stdout.fnmatch_lines(
        ["contracts: 0 classes recorded*", "contracts: left as it was: *contracts did not run)"]
    )
    assert after == record, "a run of a part changed the record"
