"""engine new."""

from __future__ import annotations


def test_a_new_plugin_is_written_where_it_is_asked_for(engine, tmp_path):
    answer = engine("new", "plugin", "my_reward", "--dir", "mine")
    assert answer.code == 0
    folder = tmp_path / "mine" / "engine-plugin-my-reward"
    assert answer.out.splitlines()[0] == str(folder.relative_to(tmp_path))
    assert "pip install -e mine/engine-plugin-my-reward" in answer.out
    assert "my_reward" in (folder / "pyproject.toml").read_text()


def test_a_name_that_cannot_be_one_is_refused(engine, tmp_path):
    answer = engine("new", "plugin", "My Reward")
    assert answer.code == 2
    assert "Plugin name 'My Reward'" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_file_is_never_written_over_another(engine, tmp_path):
    assert engine("new", "run", "first").out.splitlines()[0] == "first/run.toml"
    assert (tmp_path / "first" / "data").is_dir()
    answer = engine("new", "run", "first")
    assert answer.code == 2
    assert "Not written, because it exists" in answer.err


def test_a_place_that_cannot_be_written_is_refused(engine, tmp_path):
    (tmp_path / "file").write_text("")
    for words in (["run", "file/first"], ["plugin", "mine", "--dir", "file/plugins"]):
        answer = engine("new", *words)
        assert answer.code == 5
        assert answer.err.endswith(f"'{tmp_path / 'file'}' is no folder. Choose another place.\n")
