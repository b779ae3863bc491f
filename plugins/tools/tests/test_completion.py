"""What a shell completes."""

from __future__ import annotations

import pytest

from engine_core.plugins.metadata import known_names


@pytest.fixture
def completed(engine, monkeypatch):
    """Return a function from typed words to what the shell would offer for the last one."""

    def complete(*words: str) -> list[str]:
        monkeypatch.setenv("_ENGINE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(["engine", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        answer = engine()
        assert answer.err == ""
        return answer.out.split()

    return complete


def test_commands_are_completed_with_those_of_groups(completed):
    assert {*completed("")} == {name.partition(".")[0] for name in known_names("commands")}
    assert completed("inspect", "r") == ["rollouts"]
    assert completed("nosuch", "x", "y") == []


def test_runs_are_completed_by_name(completed, tmp_path):
    for name in ("first", "fine", "other", "no-run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "no-run":
            (tmp_path / "runs" / name / "config.resolved.toml").touch()
    assert completed("resume", "f") == completed("inspect", "rollouts", "f") == ["fine", "first"]
    (tmp_path / "file.toml").touch()
    assert completed("eval", "fi") == ["fine", "first", "file.toml"]


def test_run_files_are_completed_with_the_folders_that_may_contain_them(completed, tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("mine.toml", "more/one.toml", "more/two.txt"):
        (tmp_path / name).touch()
    assert completed("train", "m") == ["mine.toml", "more/"]
    assert completed("train", "more/") == ["more/one.toml"]
    assert completed("train", f"{tmp_path}/mi") == [f"{tmp_path}/mine.toml"]


def test_keys_are_completed_as_the_run_file_has_them_and_none_of_its_code_runs(completed, rl_run):
    (rl_run.parent / "dice.py").write_text("raise SystemExit('this ran')")
    assert completed("train", "rl.toml", "--set", "actor.optim.b") == ["actor.optim.betas="]
    rl_run.write_text(rl_run.read_text().replace('"digits"', '"math"').replace('"dice"', '"hf"'))
    assert "reward.math.weight=" in completed("train", "rl.toml", "--set", "reward.math.")


def test_keys_are_completed_for_a_run_and_without_a_file(completed, tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.resolved.toml").write_text('[[reward]]\nname = "numeric"\n')
    assert "reward.numeric.weight=" in completed("resume", "first", "--set", "reward.")
    assert completed("train", "--set", "run.step") == ["run.steps="]
    (tmp_path / "bad.toml").write_text("[run")
    assert "run.steps=" in completed("train", "bad.toml", "--set", "run.st")


def test_a_word_that_no_completion_can_read_is_left_as_it_is(completed, monkeypatch):
    too_long = "a" * 300
    assert completed("train", "**") == completed("train", "[") == completed("train", "nosuch/") == []
    for words in (("resume", too_long), ("train", f"{too_long}.toml")):
        assert completed(*words, "--set", "run.step") == ["run.steps="]
    monkeypatch.setenv("ENGINE__NOSUCH", "1")
    assert completed("train", "--set", "run.step") == []
