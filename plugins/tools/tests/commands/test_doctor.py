"""engine doctor."""

from __future__ import annotations

import json

import pytest

from engine_core.plugins.metadata import known_names
from engine_core.plugins.plugin_set import PluginSet
from engine_core.runs import machine
from engine_plugin_tools.commands import doctor
from engine_plugin_tools.commands.checks import Check, show_checks
from engine_plugin_tools.plugin_list import PluginInfo

NAMES = [
    "python",
    "memory",
    "shared memory",
    "open files",
    "disk",
    "reward code",
    "plugins",
    "torch",
]


def expected_names():
    """Return ``NAMES``, with a line before "plugins" for each installed train engine that reports on the machine."""
    kinds = ("rollout_engines", "train_engines")
    plugins = PluginSet.load({kind: sorted(known_names(kind)) for kind in kinds})
    told = [
        f"{kind.removesuffix('s')} {name}"
        for kind in kinds
        for name in sorted(known_names(kind))
        if plugins.spec(kind, name).health
    ]
    end = NAMES.index("plugins")
    return [*NAMES[:end], *told, *NAMES[end:]]


@pytest.mark.slow
def test_a_machine_in_order_ends_with_0_and_each_line_is_a_state_a_name_and_what_was_found(engine):
    answer = engine("doctor")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    shown = [line.split(maxsplit=1)[1] for line in lines]
    assert all(text.startswith(f"{name} ") for text, name in zip(shown, expected_names(), strict=True))


def test_a_broken_plugin_is_a_problem_and_ends_with_5(engine, install):
    install("broken-one", {"rewards": {"broken": "broken_one"}}, {"broken_one": "import absent_module"})
    answer = engine("doctor", "--json")
    assert answer.code == 5
    checks = json.loads(answer.out)
    assert {check["name"] for check in checks} == {*expected_names()}
    problems = [check["found"] for check in checks if check["state"] == "problem"]
    [found] = [found for found in problems if found.startswith("broken (broken-one 1.0): ")]
    assert "absent_module" in found
    [types] = [check["found"] for check in checks if check["name"] == "train_engine torch"]
    assert types.startswith("precision auto: ")


def test_a_full_disk_and_a_small_memory_are_warnings_with_advice(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_MEMORY", 2**60)
    memory = doctor.check_memory()
    assert memory.state == "warning"
    assert memory.found.endswith("GiB or more are expected. End other programs, or use a smaller model.")
    monkeypatch.setattr(machine.check_disk, "__defaults__", (2**60,))
    disk = next(check for check in doctor.check_runs_folder(tmp_path) if check.name == "disk")
    assert disk.state == "warning"
    assert "set run.dir to another disk" in disk.found


def test_a_runs_folder_that_is_a_file_is_a_problem(tmp_path):
    (tmp_path / "runs").write_text("not a folder")
    problem = next(doctor.check_runs_folder(tmp_path / "runs"))
    assert problem.state == "problem"
    assert problem.found == (
        f"'{tmp_path / 'runs'}' is no folder. Set run.dir to a folder that you may write to."
    )


def test_torch_that_does_not_import_is_a_problem_with_advice(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    check = doctor.check_torch()
    assert check.state == "problem"
    assert "Reinstall it: pip install --force-reinstall torch" in check.found


def test_torch_is_shown_with_its_device():
    import torch

    check = doctor.check_torch()
    where = "device(s) of type" if torch.accelerator.is_available() else "no accelerator"
    assert check.state == "ok"
    assert check.found.startswith(f"{torch.__version__}, ")
    assert where in check.found


@pytest.mark.parametrize(("fit", "state"), [(True, "ok"), (False, "warning")])
def test_what_a_plugin_says_of_the_machine_is_a_line(monkeypatch, fit, state):
    info = PluginInfo("code", "rewards", "acme", "1.0", "acme.plugin", None, "sandbox: none", fit)
    monkeypatch.setattr(doctor, "list_plugins", lambda check: [info])
    first, last = doctor.check_plugins()

    assert first == (state, "reward code", "sandbox: none")
    assert last == ("ok", "plugins", "1 names of acme 1.0")


def test_each_check_is_printed_when_it_is_done(capsys):
    def checks():
        yield Check("ok", "python", "3")
        assert capsys.readouterr().out == "ok       python                3\n"
        yield Check("problem", "torch", "none")

    assert show_checks(checks(), False, 5) == 5
