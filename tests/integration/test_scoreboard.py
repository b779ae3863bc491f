"""The page of contracts by backend says what the suites' recorded runs gave."""

import importlib
import json
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.recorder import settings

DOCS = Path(__file__).parents[2] / "docs"
EXPORT = TrainEngineSuite.contracts["test_export_is_loaded_by_from_pretrained"]
(MOVES,) = (made for made in TrainEngineSuite.contracts.values() if made.follow)
LENT = TrainEngineSuite.contracts["test_the_generation_module_gives_the_logits_of_the_policy"]


@pytest.fixture(scope="module")
def scoreboard():
    return SimpleNamespace(**runpy.run_path(str(DOCS / "scoreboard.py")))


class Whole(TrainEngineSuite):
    backend = "torch"
    resumes_on = (2,)


class Part(TrainEngineSuite):
    backend = "torch"
    unsupported = {EXPORT.name: "it has no folder"}


@pytest.fixture
def record(scoreboard):
    """``record({Whole: {contract: outcome}})``: as the runs of these suites left it, all else passed."""

    def of(outcomes):
        return {
            f"{scoreboard.SUITES['torch']}::{suite.__name__}": {
                **json.loads(json.dumps(settings(suite))),
                "contracts": dict.fromkeys(suite.contracts, "passed")
                | {contract.name: outcome for contract, outcome in own.items()},
            }
            for suite, own in outcomes.items()
        }

    return of


def reason_of(suite, contract):
    """Why a suite skips a contract, in the words that a report has."""
    with pytest.raises(pytest.skip.Exception) as raised:
        suite().check(contract)
    return str(raised.value)


def test_the_page_is_up_to_date(scoreboard):
    assert scoreboard.PAGE.read_text("utf-8") == scoreboard.page(), "Run python docs/scoreboard.py."


def test_every_train_engine_of_this_repository_has_a_column(scoreboard):
    """Those that train: the suite asks for updates, which models that are never trained refuse."""
    offered = {}
    for file in (DOCS.parent / "plugins").glob("[a-z]*/pyproject.toml"):
        entries = tomllib.loads(file.read_text("utf-8"))["project"]["entry-points"].get(
            "engine.train_engines", {}
        )
        for module in {*entries.values()}:
            offered |= importlib.import_module(module).engine_train_engines()
    trained = {name for name, backend in offered.items() if not backend.frozen_only}
    assert {*scoreboard.SUITES} == {"torch"} | trained
    assert "fsdp" in trained
    assert "vllm" in offered
    assert all(list(scoreboard.suites_of(backend)) for backend in scoreboard.SUITES)


def test_no_recorded_contract_failed_and_none_was_renamed_since(scoreboard):
    record = scoreboard.read(scoreboard.RECORD)
    for backend in scoreboard.SUITES:
        for suite in scoreboard.suites_of(backend):
            run = scoreboard.run_of(suite, record)
            for name, outcome in run["contracts"].items() if run else ():
                assert name in suite.contracts, (
                    f"{suite.__name__}: run python docs/scoreboard.py --record {backend}."
                )
                assert outcome != "failed", f"{suite.__name__}: {name}"


@pytest.mark.slow  # it asks for `make scoreboard`, half an hour; until then the page says `not run`
def test_every_class_of_the_kit_has_a_recorded_run(scoreboard):
    record = scoreboard.read(scoreboard.RECORD)
    missing = [
        f"{backend} {suite.__name__}"
        for backend in scoreboard.SUITES
        for suite in scoreboard.suites_of(backend)
        if not (run := scoreboard.run_of(suite, record)) or run["contracts"].keys() != suite.contracts.keys()
    ]
    assert not missing, (
        f"No run of {', '.join(missing)} as they are now. Run python docs/scoreboard.py --record."
    )


def test_a_contract_that_a_setting_does_not_keep_is_told_with_its_reason(scoreboard, record):
    assert scoreboard.cell(EXPORT, [Whole, Part], record({Whole: {}, Part: {}})) == "passes"
    found = record({Whole: {}, Part: {EXPORT: reason_of(Part, EXPORT)}})
    assert scoreboard.cell(EXPORT, [Whole, Part], found) == "1 passes; 2 cannot: it has no folder"
    assert scoreboard.cell(EXPORT, [Part], found) == "cannot: it has no folder"
    failed = record({Whole: {EXPORT: "failed"}, Part: {}})
    assert scoreboard.cell(EXPORT, [Whole, Part], failed) == "1 **fails**; 2 passes"


def test_what_was_not_tested_or_not_run_is_not_called_kept(scoreboard, record):
    found = record({Whole: {}, Part: {MOVES: reason_of(Part, MOVES)}})
    assert scoreboard.cell(MOVES, [Whole, Part], found) == "1 passes; 2 not tested"
    assert scoreboard.cell(EXPORT, [Whole, Part], record({Part: {}})) == "1 not run; 2 passes"
    (entry,) = (other := record({Whole: {}})).values()
    entry["options"] = {"param_dtype": "bf16"}
    assert scoreboard.cell(EXPORT, [Whole], other) == "not run", "a run with other settings"


def test_a_capability_that_is_not_declared_is_not_there_yet(scoreboard, record):
    found = record({Whole: {LENT: reason_of(Whole, LENT)}})
    assert scoreboard.cell(LENT, [Whole], found) == "not yet: `generation_module`"
