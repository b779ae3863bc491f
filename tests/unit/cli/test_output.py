"""Tables and JSON on stdout."""

from __future__ import annotations

from pathlib import Path

from engine_core.cli.output import print_json, print_table


def test_columns_are_aligned_and_have_no_trailing_spaces(capsys):
    print_table([("a", "long word"), ("longer", "b")], header=("X", "Y"))
    assert capsys.readouterr().out == "X       Y\na       long word\nlonger  b\n"


def test_a_cell_cannot_steer_the_terminal(capsys):
    print_table([("evil\x1b[2J", "1.0")])
    assert capsys.readouterr().out == "evil\\x1b[2J  1.0\n"


def test_what_json_has_not_is_text(capsys):
    print_json({"path": Path("runs/a"), "name": "é"})
    assert capsys.readouterr().out == '{\n  "path": "runs/a",\n  "name": "é"\n}\n'
