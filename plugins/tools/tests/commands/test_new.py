"""engine new."""

from __future__ import annotations

from engine_plugin_tools.recipes import RECIPES


def test_a_new_plugin_is_written_where_it_is_asked_for(engine, tmp_path):
    answer = engine("new", "plugin", "my_reward", "--dir", "mine")
    assert answer.code == 0
    folder = tmp_path / "mine" / "engine-plugin-my-reward"
    assert answer.out.splitlines()[0] == str(folder.relative_to(tmp_path))
    assert "pip install -e 'mine/engine-plugin-my-reward[dev]'" in answer.out
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


def test_the_recipes_are_listed_with_their_hardware(engine, tmp_path):
    answer = engine("new", "run", "--list")
    assert answer.code == 0
    assert "qwen3-0.6b-gsm8k              1 GPU of 24 GB    Qwen3-0.6B on GSM8K, GRPO\n" in answer.out
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_is_written_as_it_is_and_the_next_commands_are_printed(engine, tmp_path):
    answer = engine("new", "run", "small", "--recipe", "qwen3-0.6b-gsm8k")
    assert answer.code == 0
    path, about, install, check, train = answer.out.splitlines()
    assert path == "small/run.toml"
    assert about == "Qwen3-0.6B on GSM8K, GRPO: 1 GPU of 24 GB, not run by us on real weights."
    assert install.startswith("Install:  pip install 'engine-plugin-vllm-rollout[gpu]'")
    assert check == "Check it: engine validate small/run.toml"
    assert train == "Train:    engine train small/run.toml"
    assert [file.name for file in (tmp_path / "small").iterdir()] == ["run.toml"]
    assert (tmp_path / "small/run.toml").read_text() == (RECIPES / "qwen3-0.6b-gsm8k.toml").read_text()


def test_an_unknown_recipe_writes_nothing(engine, tmp_path):
    answer = engine("new", "run", "small", "--recipe", "qwen3")
    assert answer.code == 2
    assert "--recipe 'qwen3' is unknown." in answer.err
    assert "`engine new run --list` shows all" in answer.err
    assert list(tmp_path.iterdir()) == []
