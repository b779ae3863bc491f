import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

import pytest

import engine_core
from engine_core import builtin
from engine_core.plugins.metadata import (
    CORE,
    _read,
    installed,
    known_names,
    nouns,
    our_plugins,
    split,
)
from engine_core.specs import TABLE_SPECS, Loss


def test_every_table_of_the_core_and_of_a_plugin_has_a_noun(install, without_our_plugins):
    assert set(nouns()) == {*TABLE_SPECS, "plugins", "tables"}

    install("acme", {"tables": {"query_parsers": "acme_tables"}})

    assert set(nouns()) == {*TABLE_SPECS, "plugins", "tables", "query_parsers"}
    assert nouns()["query_parsers"] == "query parser"
    assert nouns()["advantages"] == "advantage estimator"


def test_a_distribution_found_twice_on_the_path_counts_once_and_the_first_wins(
    install, tmp_path, monkeypatch
):
    site = install("acme", {"rewards": {"new": "mod"}}, version="2.0")
    second = tmp_path / "second"
    (second / "acme-1.0.dist-info").mkdir(parents=True)
    (second / "acme-1.0.dist-info" / "METADATA").write_text("Name: Acme\nVersion: 1.0\n")
    (second / "acme-1.0.dist-info" / "entry_points.txt").write_text("[engine.rewards]\nold = mod\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path, str(second)])

    acme = [offer for offer in installed() if offer.distribution.name == "acme"]

    assert [(offer.name, offer.distribution.version) for offer in acme] == [("new", "2.0")]


def test_metadata_that_is_missing_does_not_hide_the_others(install):
    site = install("acme", {"rewards": {"x": "mod"}})
    (site / "acme-1.0.dist-info" / "METADATA").unlink()
    _read.cache_clear()

    assert [(offer.name, offer.distribution.name) for offer in installed() if offer.module == "mod"] == [
        ("x", "unknown")
    ]
    assert any(offer.name == "ppo_clip" for offer in installed())


def test_other_groups_of_entry_points_are_not_ours(install):
    site = install("acme", {"rewards": {"x": "mod"}})
    entry_points = site / "acme-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text(entry_points.read_text() + "[console_scripts]\nacme = mod:main\n")

    assert [offer.kind for offer in installed() if offer.distribution.name == "acme"] == ["rewards"]


@pytest.mark.parametrize(
    ("written", "parts"),
    [("math", (None, "math")), ("acme:math", ("acme", "math")), ("plug.py:math", ("plug.py", "math"))],
)
def test_a_name_may_carry_its_distribution(written, parts):
    assert split(written) == parts


def test_install_hints_are_for_names_of_known_kinds_and_our_distributions_only():
    tables = {name for kind, name in our_plugins() if kind == "tables"}
    assert {kind for kind, _ in our_plugins()} <= {*TABLE_SPECS, "tables", *tables}
    assert all(distribution.startswith("engine-plugin-") for distribution in our_plugins().values())
    assert our_plugins()["rollout_engines", "vllm"] == "engine-plugin-vllm-rollout"


def test_the_plugins_in_this_tree_offer_what_their_install_hints_say():
    """Each folder of plugins/: its entry points are those of known_plugins.json, which names no other distribution."""
    root = Path(engine_core.__file__).parent
    hints = json.loads((root / "plugins" / "known_plugins.json").read_text())
    projects = {}
    for file in sorted(root.parent.glob("plugins/[a-z]*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        projects[project["name"]] = {
            group.removeprefix("engine."): sorted(names)
            for group, names in project["entry-points"].items()
            if group.startswith("engine.")
        }
    assert hints == projects


def test_what_is_installed_is_what_this_tree_offers():
    """An entry point that was added since the last installation is in no test: install again."""
    root = Path(engine_core.__file__).parents[1]
    for file in sorted(root.glob("plugins/[a-z]*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        offered = {
            (group.removeprefix("engine."), name, module)
            for group, names in project["entry-points"].items()
            if group.startswith("engine.")
            for name, module in names.items()
        }
        found = {(o.kind, o.name, o.module) for o in installed() if o.distribution.name == project["name"]}
        assert found in (set(), offered), f"{project['name']}: pip install --no-deps -e {file.parent}"


def test_a_name_of_the_core_is_registered_by_its_hook_alone(monkeypatch):
    """Without any metadata, and in no entry point of the core's own distribution."""
    project = tomllib.loads((Path(engine_core.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert "entry-points" not in project
    everything = builtin.engine_losses()
    monkeypatch.setattr(builtin, "engine_losses", lambda: {**everything, "new": Loss(load="nowhere:new")})
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [])
    _read.cache_clear()
    try:
        assert {offer.distribution.name for offer in installed()} == {CORE}
        assert {*known_names("losses")} == {*everything, "new"}
        assert {offer.kind for offer in installed()} >= {"advantages", "columns", "commands", "trainers"}
    finally:
        _read.cache_clear()


def test_known_names_come_with_their_distributions(install):
    install("acme", {"losses": {"ppo_clip": "mod_acme", "mine": "mod_acme"}})

    losses = known_names("losses")

    assert losses["mine"] == ["acme"]
    assert sorted(losses["ppo_clip"]) == ["acme", "engine-core-rl"]
