"""The table of supported models says what the recorded runs of ``tests/families`` gave."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_core.plugins.metadata import installed
from engine_core.plugins.plugin_set import PluginSet
from engine_core.specs import resolve
from engine_plugin_testing import RolloutEngineSuite, TrainEngineSuite
from engine_plugin_testing.families import FAMILIES, SAMPLES, TRAINS
from engine_plugin_testing.suite import UNDECLARED, UNSUPPORTED

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def table():
    return SimpleNamespace(**runpy.run_path(str(DOCS / "model_table.py")))


def test_the_page_and_what_plugins_declare_are_up_to_date(table):
    for file, make in table.written().items():
        assert file.read_text("utf-8") == make(), f"{file}: run python docs/model_table.py."


@pytest.mark.parametrize("kind", ["train_engines", "rollout_engines"])
def test_a_backend_declares_what_the_table_says_of_it(table, kind):
    record = table.read(table.RECORD)
    found = {offer.name for offer in installed() if offer.kind == kind} & {*table.BACKENDS}
    specs = {name: PluginSet.load({kind: {name}}).spec(kind, name) for name in found}
    declared = {name: resolve(spec.families) for name, spec in specs.items() if spec.families}
    for backend, families in declared.items():
        for family in FAMILIES:
            text = f"no: {families[family]}" if families[family] else "yes"
            assert text == table.cell(table.outcomes(record, backend, family)), (backend, family)
    assert len(declared) >= 2


def test_every_family_has_a_name_and_every_cell_a_run_or_a_reason(table):
    assert {*table.NAMES} == {*FAMILIES}
    record = table.read(table.RECORD)
    for family in FAMILIES:
        for backend in (*table.BACKENDS, *table.FEATURES):
            text = table.cell(table.outcomes(record, backend, family))
            assert text == "yes" or text.startswith("no: "), (family, backend, text)


def test_the_contracts_of_families_are_those_of_the_suites():
    assert {*TRAINS} <= {*TrainEngineSuite.contracts}
    assert {*SAMPLES} <= {*RolloutEngineSuite.contracts}


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        ({"test_a": "passed", "test_b": f"the spec{UNDECLARED}'lora'"}, "yes"),
        ({"test_a": "passed", "test_b": "failed"}, "**fails**"),
        ({"test_a": f"{UNSUPPORTED}no such kernel"}, "no: no such kernel"),
        ({"test_a": f"{UNSUPPORTED}no such kernel", "test_b": "failed"}, "**fails**"),
        ({"test_a": "passed", "test_an_adapter_alone_is_trained": "failed"}, "yes"),
        (None, "not run"),
    ],
)
def test_a_cell_says_what_was_recorded(table, outcomes, text):
    assert table.cell(outcomes) == text
