"""The tables of docs/algorithms.md against the docstrings that they are written from."""

import runpy
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from engine_core.config.models import AlgorithmConfig

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def tables():
    return runpy.run_path(str(DOCS / "algorithm_tables.py"))


def test_the_tables_are_what_the_code_says():
    command = [sys.executable, str(DOCS / "algorithm_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_table_that_is_out_of_date_is_named_and_mended(tables, tmp_path):
    page = tmp_path / "algorithms.md"
    page.write_text((DOCS / "algorithms.md").read_text("utf-8").replace("n / (n - 1)", "n / n"), "utf-8")
    tables["stale"].__globals__["PAGE"] = page
    assert tables["stale"]() == ["advantages"]
    assert tables["written"](page.read_text("utf-8")) == (DOCS / "algorithms.md").read_text("utf-8")


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
