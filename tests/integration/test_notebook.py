"""examples/first_model.ipynb: every cell runs, and the notebook is stored without outputs."""

import os
import re
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from engine_core import load_config
from engine_plugin_tools.recipes import RECIPES

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_model.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_stored_without_outputs(notebook):
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


def test_the_keys_to_change_for_a_published_model_have_the_values_of_its_recipe(notebook):
    advice = dict(re.findall(r"`(\w+) = ([^`]+)`", notebook.cells[0].source))
    (name,) = re.findall(r"--recipe ([\w.-]+)`", notebook.cells[0].source)
    recipe = load_config(RECIPES / f"{name}.toml")
    assert {key: tomllib.loads(f"value = {value}")["value"] for key, value in advice.items()} == {
        "path": recipe.model.path,
        "lr": recipe.actor.optim.lr,
        "max_response_tokens": recipe.rollout.max_response_tokens,
        "backend": recipe.rollout.backend,
        "chat_template": recipe.data.chat_template,
    }


@pytest.mark.slow
def test_every_cell_runs_and_the_model_learns(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    first, last = printed.split("held-out questions: ")[1].split("\n")[0].split(" -> ")
    assert float(last) > float(first) + 0.1
    assert re.search(r"have now\?\n17 \+ 8 = \d+\. Answer: \d+\n", printed)
