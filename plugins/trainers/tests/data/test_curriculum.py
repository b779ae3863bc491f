"""The rounds of a curriculum: what it is called with, what it may return, and that a resume continues alike."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from types import SimpleNamespace

import pytest

from engine_core.config.models import DataConfig
from engine_core.data import PromptSource
from engine_core.errors import DataError, PluginError
from engine_core.plugins import PluginSet
from engine_core.specs import Curriculum
from engine_plugin_trainers.data.curriculum import CurriculumOrder

PLUGIN = """
    from engine_core import hookimpl
    from engine_core.specs import Curriculum, Options


    class RisingOptions(Options):
        column: str = "level"
        "Column of the difficulty."


    def rising(rows, round, column):
        by_level = sorted(range(len(rows)), key=lambda number: rows[number].get(column, 0))
        return by_level[: 2 * (round + 1)]


    def odd(rows, round):
        return {}


    UNSOLVED


    @hookimpl
    def engine_curricula():
        return {
            "rising": Curriculum(load=rising, config=RisingOptions),
            "odd": Curriculum(load=odd),
            "unsolved": Curriculum(load=Unsolved),
        }
"""
UNSOLVED = re.search(r"    class Unsolved:.*?(?=\n\S)", inspect.getdoc(Curriculum), re.DOTALL)[0]
"""The example of the documentation."""
ROWS = [{"prompt": f"{i}", "level": -i} for i in range(6)]


@pytest.fixture
def follow(tmp_path):
    """Make a source follow a curriculum of ``PLUGIN``; ``returned`` is the result of ``odd``."""

    def make(source, name, returned="[0]", options=None):
        file = tmp_path / "own.py"
        plugin = PLUGIN.replace("    UNSOLVED", UNSOLVED)
        file.write_text(textwrap.dedent(plugin).replace("return {}\n", f"return {returned}\n", 1))
        plugins = PluginSet.load({"curricula": [name]}, [str(file)], root=tmp_path)
        spec = plugins.spec("curricula", name)
        source.curriculum = CurriculumOrder(name, spec.config(**(options or {})), plugins)
        return source

    return make


def numbers(prompts):
    return [int(prompt.id.rpartition(":")[2]) for prompt in prompts]


def scored(*rewards):
    """Rollouts of rows by number; None is a rollout without a reward."""
    return [
        SimpleNamespace(prompt=SimpleNamespace(id=f"train:{row}"), valid=reward is not None, reward=reward)
        for row, reward in rewards
    ]


def test_rounds_follow_each_other_and_the_metric_counts_them(config_of, tokenizer, follow):
    source = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), "rising")
    assert numbers(source.take(7)) == [5, 4, 5, 4, 3, 2, 5]
    assert source.counters["data/epoch"] == 2 + 1 / 6
    assert len(source) == 6
    assert numbers(source.take(1)) == [4]


def test_options_reach_the_function_and_a_row_that_cannot_be_read_is_empty(config_of, tokenizer, follow):
    rows = ["{broken", *({"prompt": "a", "steps": steps} for steps in (3, 1, 2))]
    source = PromptSource(config_of(rows, max_bad_rows=1), tokenizer, seed=0)
    follow(source, "rising", options={"column": "steps"})
    assert numbers(source.take(3)) == [2, 2, 3]  # row 0 comes first and is skipped
    assert source.counters["data/bad_rows"] == 2


def test_a_function_hears_of_no_rewards_so_rows_may_have_names(config_of, tokenizer, follow):
    config = config_of([row | {"name": "n"} for row in ROWS], columns={"id": "name"})
    source = follow(PromptSource(config, tokenizer, seed=0), "rising")
    source.curriculum.report(scored(("n", 1.0)))
    assert [prompt.text for prompt in source.take(2)] == ["5", "4"]


def test_workers_read_ahead_in_the_rounds_of_a_function(config_of, tokenizer, follow):
    one = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), "rising")
    two = follow(
        PromptSource(config_of(ROWS, num_workers=1, prompts_per_step=3), tokenizer, seed=0), "rising"
    )
    try:
        for n in (3, 3, 9):
            assert two.take(n) == one.take(n)
            assert two.counters == one.counters
            assert two.state() == one.state()
    finally:
        two.close()


def test_a_curriculum_learns_the_mean_reward_of_each_row(config_of, tokenizer, follow):
    source = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), "unsolved")
    assert numbers(source.take(6)) == [0, 1, 2, 3, 4, 5]
    source.curriculum.report(scored((2, 1.0), (2, 1.0), (3, 1.0), (3, 0.0), (4, 1.0), (4, None)))
    source.curriculum.report(scored((5, None)))
    assert numbers(source.take(4)) == [0, 1, 3, 5]


@pytest.mark.parametrize("position", range(14))
@pytest.mark.parametrize("name", ["rising", "unsolved"])
def test_a_resume_at_any_position_continues_alike(config_of, tokenizer, follow, name, position):
    def step(source, number):
        (row,) = numbers(source.take(1))
        source.curriculum.report(scored((row, float(number % 3 == 0))))
        return row

    whole = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), name)
    expected = [step(whole, number) for number in range(16)]

    source = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), name)
    for number in range(position):
        step(source, number)
    state = json.loads(json.dumps(source.state()))
    resumed = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), name)
    resumed.load_state(state)
    assert resumed.state() == state
    assert resumed.counters == source.counters
    assert [step(resumed, number) for number in range(position, 16)] == expected[position:]


@pytest.mark.parametrize("returned", ["[]", "[6]", "[-1]", "['a']", "[0.5]", "None", "[2**70]", "3"])
def test_what_is_no_list_of_row_numbers_is_refused(config_of, tokenizer, follow, returned):
    source = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), "odd", returned)
    with pytest.raises(PluginError) as caught:
        source.take(1)
    assert str(caught.value).startswith("Plugin file '")
    assert (
        "curriculum 'odd' must return row numbers from 0 to 5, at least one; for round 0 it returned "
        in str(caught.value)
    )


def test_the_failure_of_a_curriculum_names_the_plugin(config_of, tokenizer, follow):
    source = follow(PromptSource(config_of(ROWS), tokenizer, seed=0), "odd", "rows[99]")
    with pytest.raises(PluginError, match=r"own\.py' .*: curriculum 'odd' failed: IndexError"):
        source.take(1)


def test_a_class_without_the_methods_of_a_curriculum_is_refused(config_of, tokenizer, follow, monkeypatch):
    monkeypatch.setitem(globals(), "UNSOLVED", UNSOLVED.replace("def update", "def updated"))
    with pytest.raises(
        PluginError, match=r"Unsolved has no update, so .* A curriculum without state is a function"
    ):
        follow(PromptSource(config_of(ROWS), tokenizer, seed=0), "unsolved")


def test_rounds_of_unusable_rows_alone_end_the_run(config_of, tokenizer, follow):
    source = PromptSource(config_of([*ROWS, {"prompt": 5}], max_bad_rows=1), tokenizer, seed=0)
    follow(source, "odd", "[6]")
    with pytest.raises(DataError, match=r"None of the 1 rows of round 0 is usable. Last: train.jsonl:7: "):
        source.take(1)


def test_rows_of_a_program_have_rounds_too(tokenizer, follow):
    source = follow(PromptSource(DataConfig(), tokenizer, seed=0, rows=ROWS), "rising")
    assert numbers(source.take(2)) == [5, 4]
