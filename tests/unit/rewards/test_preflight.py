"""What rewards refuse before a run begins."""

from pathlib import Path

import pytest

from engine_core.config.rewards import RewardConfig
from engine_core.errors import ConfigError, DataError
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards.preflight import check_rewards, check_rows

PLUGIN = '''
from engine_core import hookimpl
from engine_core.errors import ConfigError
from engine_core.specs import Options, Reward


class Limits(Options):
    most: int = 3
    """Most letters."""


def short(completion, answer, most):
    return 1.0


def make_check(most, timeout, root):
    if most > timeout:
        raise ConfigError(f"most = {most} with timeout {timeout:g} in {root.name}")

    def check(columns):
        if "answer" not in columns:
            raise LookupError("has no answer.")
        if len(columns["answer"]) > most:
            raise ValueError(f"cannot use {columns['answer']!r}.")

    return check


def silent(most):
    return None


@hookimpl
def engine_rewards():
    return {
        "short": Reward(load=short, config=Limits, check=make_check),
        "long": Reward(load=short, config=Limits, check=silent),
        "plain": Reward(load=short, config=Limits),
    }
'''


def checked(folder: Path, *rewards: RewardConfig):
    (folder / "offers.py").write_text(PLUGIN)
    plugins = PluginSet.load({"rewards": [each.name for each in rewards]}, ["offers.py"], folder)
    return check_rewards(rewards, plugins)


def test_a_check_gets_options_and_context_and_gives_what_judges_rows(tmp_path):
    found = checked(tmp_path, *(RewardConfig(name=name) for name in ("short", "long", "plain")))
    assert list(found) == ["short"]
    found["short"]({"answer": "abc"})
    with pytest.raises(ValueError, match="cannot use 'abcd'"):
        found["short"]({"answer": "abcd"})
    with pytest.raises(ConfigError, match=rf"most = 3 with timeout 2 in {tmp_path.name}"):
        checked(tmp_path, RewardConfig(name="short", timeout_seconds=2.0))


def rows(*answers):
    """``rows("ab", None)``: the second has no answer."""
    return [(f"a.jsonl:{i}", {} if a is None else {"answer": a}) for i, a in enumerate(answers, 1)]


@pytest.fixture
def checks(tmp_path):
    return checked(tmp_path, RewardConfig(name="short"))


def test_a_row_that_is_of_no_use_is_refused_with_its_place_unless_so_many_may_be(checks):
    check_rows(checks, rows("a", "b"), 0, alone=True)
    check_rows(checks, [], 0, alone=True)
    check_rows({}, rows(None), 0, alone=True)
    for alone in (True, False):
        check_rows(checks, rows("a", "long", "b"), 1, alone)
        with pytest.raises(DataError) as exc:
            check_rows(checks, rows("a", "long", "b", "longer"), 1, alone)
    assert str(exc.value) == (
        "a.jsonl:2: reward 'short' cannot use 'long'. Such rows: 2 of 4 that were looked at; [data] max_bad_rows is 1."
    )


def test_a_row_to_which_the_only_reward_does_not_apply_is_of_no_use(checks):
    with pytest.raises(DataError, match=r"a\.jsonl:2: reward 'short' has no answer\. Such rows: 1 of 3"):
        check_rows(checks, rows("a", None, "b"), 0, alone=True)
    check_rows(checks, rows("a", None, "b"), 0, alone=False)


def test_a_reward_that_applies_to_no_row_is_refused_beside_others_too(checks):
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: reward 'short' has no answer\. None of the 2 rows .* has any"
    ):
        check_rows(checks, rows(None, None), 9, alone=False)


def test_a_bug_of_a_check_is_a_bug(checks):
    def broken(columns):
        return columns["nothing"]

    with pytest.raises(KeyError):
        check_rows({"short": broken}, rows("a"), 0, alone=True)
