"""``tests/data/mistakes.md``: mistakes in run files, and what the first command that can know them answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from engine_core.errors import ConfigError
from engine_plugin_tools.commands.configs import as_record

TABLE = (Path(__file__).parents[2] / "data" / "mistakes.md").read_text("utf-8")
RUN_FILE, PLUGIN = re.findall(r"```\w+\n(.*?)```", TABLE, re.DOTALL)
MISTAKES = [
    tuple(cell.strip().replace("⏎", "\n").replace("¦", "|") for cell in row.split(" | "))
    for row in re.findall(r"^\| (.*) \|$", TABLE, re.MULTILINE)[2:]
]


@pytest.fixture
def project(tmp_path, tiny_model):
    """A folder with the run file of the table and everything that it names."""
    shutil.copytree(tiny_model, tmp_path / "model")
    rows = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(6))
    for name in ("train.jsonl", "valid.jsonl", "train.txt"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "metrics.jsonl").write_text("{}\n")
    return tmp_path


def plant(project, mistake, monkeypatch):
    """Make the mistake: an edit of a file, an added end, a new file, or a variable."""
    if edit := re.fullmatch(r"(?:(\S+): )?`(.*)` → `(.*)`", mistake, re.DOTALL):
        file = project / (edit[1] or "run.toml")
        assert edit[2] in file.read_text()
        file.write_text(file.read_text().replace(edit[2], edit[3], 1))
    elif variable := re.fullmatch(r"(ENGINE_\w+)=`(.*)`", mistake):
        monkeypatch.setenv(variable[1], variable[2])
    elif new := re.fullmatch(r"(\S+) = `(.*)`", mistake, re.DOTALL):
        (project / new[1]).write_text(new[2])
    elif end := re.fullmatch(r"end \+ `(.*)`", mistake, re.DOTALL):
        (project / "run.toml").write_text(RUN_FILE + end[1])
    else:
        assert not mistake


def test_the_table_has_many_mistakes_and_no_mistake_twice():
    assert len(MISTAKES) >= 150
    assert len(set(MISTAKES)) == len(MISTAKES)
    assert all(len(row) == 6 for row in MISTAKES)


def test_the_run_file_without_a_mistake_is_valid(engine, project):
    assert engine("validate", "run.toml").code == 0
    assert engine("train", "run.toml", "--dry-run").code == 0


@pytest.mark.parametrize("row", MISTAKES, ids=[" ".join(row[:2]).strip() for row in MISTAKES])
def test_a_mistake_is_named_with_its_place_its_key_and_a_hint(engine, project, monkeypatch, row):
    mistake, command, code, place, key, hint = row
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    plant(project, mistake, monkeypatch)
    first, *rest = command.split()
    answer = engine(first, *([] if "nix.toml" in rest else ["run.toml"]), *rest)
    lines = [line.removeprefix("engine: ") for line in answer.err.splitlines() if line.startswith("engine: ")]
    found = as_record(lines[0].replace(f"{project}/", ""), ConfigError(""))
    assert answer.code == int(code)
    assert "Traceback" not in answer.err
    assert (found["key"] or "") == key
    assert hint in lines[0].replace(f"{project}/", "")
    if re.fullmatch(r"\S+:\d+", place):
        assert f"{found['file']}:{found['line']}" == place
    else:
        assert lines[0].replace(f"{project}/", "").startswith(place)
