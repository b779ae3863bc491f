"""engine plugins."""

from __future__ import annotations

import json

from engine_core import __version__

BROKEN = {"rewards": {"broken": "broken_one"}}, {"broken_one": "import absent_module"}


def test_the_list_shows_name_kind_distribution_version_and_health(engine):
    lines = engine("plugins").out.splitlines()
    assert lines[0].split() == ["NAME", "KIND", "DISTRIBUTION", "VERSION", "STATE"]
    rows = [line.split() for line in lines]
    assert ["rl", "trainers", "engine-core-rl", __version__, "ok"] in rows
    assert ["torch", "train_engines", "engine-plugin-torch", __version__, "ok"] in rows


def test_the_list_of_one_kind(engine):
    lines = engine("plugins", "rewards").out.splitlines()[1:]
    assert lines
    assert all(line.split()[1] == "rewards" for line in lines)
    assert engine("plugins", "train-engines").out == engine("plugins", "train_engines").out
    answer = engine("plugins", "reward")
    assert answer.code == 2
    assert "Did you mean 'rewards'?" in answer.err


def test_the_list_as_json(engine):
    found = {(info["kind"], info["name"]): info for info in json.loads(engine("plugins", "--json").out)}
    assert found["trainers", "rl"]["healthy"] is True
    assert found["trainers", "rl"]["distribution"] == "engine-core-rl"


def test_a_broken_plugin_is_found_by_check_alone_and_ends_with_3(engine, install):
    install("broken-one", *BROKEN)
    assert engine("plugins").code == 0
    answer = engine("plugins", "--check")
    assert answer.code == 3
    [line] = [line for line in answer.out.splitlines() if line.startswith("broken ")]
    assert "problem: " in line
    assert "absent_module" in line


def test_an_absent_module_is_seen_without_an_import(engine, install):
    install("hollow", {"rewards": {"hollow": "hollow_module"}})
    [line] = [line for line in engine("plugins").out.splitlines() if line.startswith("hollow ")]
    assert "problem: its module 'hollow_module' is absent; reinstall hollow" in line
