"""The table of suites: what each asks for, and its page in the docs."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.config.evaluation import EvalSetConfig
from engine_core.errors import ConfigError
from engine_plugin_rewards.plugin import engine_rewards
from engine_plugin_tools.suites import SUITES, chosen_suites, folder_of, run_settings
from engine_plugin_trainers.datasets.table import SETS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_measures_the_held_out_rows_of_a_set_with_rewards_that_exist(name):
    suite, rewards = SUITES[name], engine_rewards()
    assert SETS[suite.source].validation
    assert not suite.shots or SETS[suite.source].train
    assert all(rewards[reward].answers for reward in suite.rewards)
    assert suite.url.startswith("https://")
    assert suite.differs
    assert set(suite.sampling) <= set(EvalSetConfig.model_fields)


def test_a_suite_is_an_eval_set():
    table = SUITES["gsm8k_5shot"].eval_set("gsm8k_5shot", Path("/copies/gsm8k"))
    assert table == {
        "name": "gsm8k_5shot",
        "source": "gsm8k",
        "gsm8k": {"shots": 5, "suffix": "", "folder": "/copies/gsm8k"},
        "chat_template": False,
        "rewards": ["gsm8k", "numeric"],
        "stop": ["Question:", "</s>", "<|im_end|>"],
        "max_response_tokens": 256,
    }


def test_names_may_be_repeated_or_listed():
    assert list(chosen_suites(["gsm8k, math", "aime24"])) == ["gsm8k", "math", "aime24"]
    with pytest.raises(ConfigError, match=r"--suite: unknown suite 'mth500'\. Did you mean 'math500'\?"):
        chosen_suites(["gsm8k,mth500"])


def test_the_rewards_of_several_suites_are_named_once_with_their_options():
    settings = run_settings(chosen_suites(["gsm8k,gsm8k_5shot,math500"]), None)
    assert settings["reward"] == [
        {"name": "gsm8k", "gsm8k": {}},
        {"name": "numeric", "numeric": {"boxed": "ignore"}},
        {"name": "math", "math": {}},
    ]


def test_a_folder_is_that_of_one_set_or_holds_one_for_each(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    gsm8k, math = SUITES["gsm8k"], SUITES["math"]
    assert folder_of(gsm8k, None, several=False) is None
    assert folder_of(gsm8k, tmp_path, several=False) == tmp_path / "gsm8k"
    assert folder_of(math, tmp_path, several=False) == tmp_path
    assert folder_of(gsm8k, tmp_path, several=True) == tmp_path / "gsm8k"
    with pytest.raises(ConfigError, match=r"--source: there is no folder '.*/math'\. Expected a copy"):
        folder_of(math, tmp_path, several=True)


def test_the_page_is_what_the_table_says():
    command = [sys.executable, str(DOCS / "suite_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_page_that_is_out_of_date_is_named_and_written(tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(DOCS / "suite_table.py"))
    page, right = tmp_path / "evaluation_suites.md", script["PAGE"].read_text("utf-8")
    page.write_text(right.replace("zero-shot", "5-shot"), "utf-8")
    script["main"].__globals__["PAGE"] = page
    monkeypatch.setattr(sys, "argv", ["suite_table.py", "--check"])
    assert script["main"]() == 1
    assert "evaluation_suites.md is out of date" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["suite_table.py"])
    assert script["main"]() == 0
    assert page.read_text("utf-8") == right
