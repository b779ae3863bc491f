"""docs/reference/algorithms.md against the docstrings that it is written from."""

import runpy
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from engine_core import builtin
from engine_core.algorithms import correction
from engine_core.algorithms.regularizers import ESTIMATORS
from engine_core.config.models import AlgorithmConfig, CorrectionConfig
from engine_plugin_trainers.options import PAIR_LOSSES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def tables():
    return runpy.run_path(str(DOCS / "algorithm_tables.py"))


def test_the_tables_are_what_the_code_says():
    command = [sys.executable, str(DOCS / "algorithm_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_page_that_is_out_of_date_is_named_and_written(tables, tmp_path, monkeypatch, capsys):
    page = tmp_path / "algorithms.md"
    page.write_text(
        (DOCS / "reference" / "algorithms.md").read_text("utf-8").replace("n / (n - 1)", "n / n"), "utf-8"
    )
    tables["main"].__globals__["OVERVIEW"] = page
    monkeypatch.setattr(sys, "argv", ["algorithm_tables.py", "--check"])
    assert tables["main"]() == 1
    assert "algorithms.md is out of date" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["algorithm_tables.py"])
    assert tables["main"]() == 0
    assert page.read_text("utf-8") == (DOCS / "reference" / "algorithms.md").read_text("utf-8")


def test_a_function_without_a_formula_is_named(tables):
    def silent():
        """Says nothing."""

    with pytest.raises(SystemExit, match=r"silent: no line 'Formula"):
        tables["fields"](silent)


def test_a_field_goes_on_in_indented_lines(tables):
    def long():
        """Long.

        Formula: ``a``
            and ``b``
        Paper: https://arxiv.org/abs/1, https://arxiv.org/abs/2 (more)
        """

    found = tables["fields"](long)
    assert found["Formula"] == "`a` and `b`"
    assert found["Paper"] == "[1](https://arxiv.org/abs/1), [2](https://arxiv.org/abs/2) (more)"
    assert found["Differs"] == ""


@pytest.mark.parametrize("key", ["loss_aggregation", "kl_estimator", "kl_in"])
def test_every_choice_of_a_key_is_on_the_page(key):
    page = (DOCS / "algorithms.md").read_text("utf-8")
    for choice in typing.get_args(AlgorithmConfig.model_fields[key].annotation):
        assert f"`{choice}`" in page or f'"{choice}"' in page, choice


def choices(model, key):
    return typing.get_args(typing.get_type_hints(model)[key])


def test_the_reference_has_every_algorithm_by_its_name(tables):
    named = {}
    for kind, entries in tables["kinds"]():
        named.setdefault(kind, set()).update(entries)
    switches = {
        f"{key} = {choice}"
        for key in ("level", "mask", "reject")
        for choice in choices(CorrectionConfig, key)
    }
    off = {f"{key} = off" for key in ("level", "mask", "reject")} | {"level = auto"}
    assert named["advantage"] == set(builtin.engine_advantages())
    assert named["loss"] == set(builtin.engine_losses())
    assert named["dpo.loss"] == set(PAIR_LOSSES)
    assert named["kl_estimator"] == set(ESTIMATORS)
    assert named["loss_aggregation"] == set(choices(AlgorithmConfig, "loss_aggregation")) - {"auto"}
    assert named["correction"] >= switches - off
    assert named["objective"] >= {*builtin.engine_objectives(), "kto", "reward_model", "distill"}


def test_a_row_that_goes_on_and_a_difference_are_read(tables):
    rows = tables["listed"](correction)
    assert rows["reject = k2"]["Formula"] == (
        "only sequences with `mean_t (log s_t)^2 / 2` at most its value at `reject_ratio`"
    )
    assert rows["mask = token"]["Paper"] == "IcePop, [2510.18855](https://arxiv.org/abs/2510.18855)"
    assert rows["reject = k1"]["Differs"].startswith("bounds are on s (verl tests")
