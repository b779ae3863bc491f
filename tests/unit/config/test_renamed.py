"""A run file with the old name of a key or of a metric gets an error that names the new one."""

from pathlib import Path

import pytest

from engine_core.config.checks import RENAMED_METRICS
from engine_core.config.roles import OptimConfig
from engine_core.specs import Options
from engine_core.tables import Table
from engine_plugin_ray.plugin import RayOptions
from engine_plugin_tools.commands.schema import installed_specs
from engine_plugin_trainers.options import DPOOptions


@pytest.fixture
def learning_rate(monkeypatch):
    """A key of the core that has an old name."""
    monkeypatch.setattr(OptimConfig, "renamed", {"learning_rate": "lr"})


def test_an_old_key_of_the_core_is_refused_with_its_new_name(problems_of, learning_rate):
    (problem,) = problems_of("[actor.optim]\nlearning_rate = 1e-6")
    assert problem == (
        "2: actor.optim.learning_rate: was renamed to 'lr'. Table of the core; see: engine schema actor.optim"
    )


def test_an_old_key_of_an_override_and_of_the_environment_is_refused_with_its_new_name(
    problems_of, learning_rate
):
    (problem,) = problems_of("", "actor.optim.learning_rate=1e-6")
    assert problem.startswith("--set actor.optim.learning_rate: was renamed to 'lr'.")
    (problem,) = problems_of("", env={"ENGINE__ACTOR__OPTIM__LEARNING_RATE": "1e-6"})
    assert "actor.optim.learning_rate: was renamed to 'lr'." in problem


def test_an_old_key_of_a_plugin_is_refused_with_its_new_name(problems_of):
    (problem,) = problems_of("[[reward]]\nname = 'format'\n[reward.format]\npattern = 'x'\npart = 1.0")
    assert problem.startswith(
        "5: reward.format.format.part: was renamed to 'share'. Table of reward 'format'"
    )


@pytest.mark.parametrize(("old", "new"), RENAMED_METRICS.items())
def test_an_old_metric_is_refused_with_its_new_name(problems_of, old, new):
    problems = problems_of(f"[run]\nstop_above = {{ '{old}' = 1 }}\n[checkpoint]\nbest_metric = '{old}'")
    assert [problem.partition("metric ")[2] for problem in problems] == [
        f"'{old}' was renamed to '{new}'."
    ] * 2
    assert problems[0].startswith("2: run.stop_above.")
    assert problems[1].startswith("4: checkpoint.best_metric: ")


def tables(base):
    """Every option or core table that derives from ``base``."""
    for table in base.__subclasses__():
        yield table
        yield from tables(table)


def test_every_new_name_is_a_key_of_its_table_and_no_old_name_is():
    installed_specs()  # imports the option tables of all plugins
    found = {table: table.renamed for base in (Table, Options) for table in tables(base) if table.renamed}
    assert {DPOOptions, RayOptions} <= set(found)
    for table, renamed in found.items():
        keys = set(table.model_fields)
        assert set(renamed.values()) <= keys, table
        assert not keys & set(renamed), table


def test_the_metrics_page_has_every_new_name_and_no_old_one():
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert all(f"`{new}`" in text and f"`{old}`" not in text for old, new in RENAMED_METRICS.items())
