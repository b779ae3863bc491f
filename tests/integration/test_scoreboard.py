"""The page of contracts by backend says what the suites declare."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core.testing import TrainEngineSuite

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def scoreboard():
    return SimpleNamespace(**runpy.run_path(str(DOCS / "scoreboard.py")))


class Whole(TrainEngineSuite):
    backend = "torch"
    resumes_on = (2,)


class Part(TrainEngineSuite):
    backend = "torch"
    unsupported = {"test_export_is_loaded_by_from_pretrained": "it has no folder"}


def cell(scoreboard, name, *suites):
    return scoreboard.cell(TrainEngineSuite.contracts[f"test_{name}"], "torch", [*suites])


def test_the_page_is_up_to_date(scoreboard):
    assert scoreboard.PAGE.read_text("utf-8") == scoreboard.page(), "Run python docs/scoreboard.py."


def test_every_train_engine_of_this_repository_has_a_column(scoreboard):
    assert {*scoreboard.SUITES} == {"torch"} | {
        line.split(" = ")[0]
        for file in (DOCS.parent / "plugins").glob("[a-z]*/pyproject.toml")
        for line in file.read_text("utf-8")
        .partition('"engine.train_engines"]\n')[2]
        .split("\n\n")[0]
        .splitlines()
    }
    assert all(list(scoreboard.settings(backend)) for backend in scoreboard.SUITES)


def test_a_contract_that_a_setting_does_not_keep_is_told_with_its_reason(scoreboard):
    name = "export_is_loaded_by_from_pretrained"
    assert cell(scoreboard, name, Whole, Whole) == "yes"
    assert cell(scoreboard, name, Whole, Part) == "1 of 2 settings: it has no folder"
    assert cell(scoreboard, name, Part) == "no: it has no folder"


def test_a_resume_that_no_setting_tests_is_not_called_kept(scoreboard):
    (contract,) = (made for made in TrainEngineSuite.contracts.values() if made.follow)
    name = contract.name.removeprefix("test_")
    assert cell(scoreboard, name, Whole) == "yes"
    assert cell(scoreboard, name, Whole, Part) == "1 of 2 settings: elsewhere not tested"
    assert cell(scoreboard, name, Part) == "no: not tested"


def test_a_capability_that_is_not_declared_is_not_there_yet(scoreboard):
    contract = SimpleNamespace(name="test_x", capability="teleport", follow=None)
    assert scoreboard.cell(contract, "torch", [Whole]) == "not yet: `teleport`"
