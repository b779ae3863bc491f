"""``[eval]`` and ``[[eval.set]]``: what a set takes from the table above it, and what is refused."""

import pytest

from engine_core.config import dump_toml
from engine_core.config.dump import as_data
from engine_core.config.evaluation import held_out_sets

SETS = """
[data]
validation = "held.jsonl"
[rollout]
max_response_tokens = 99
[eval]
temperature = 0.6
samples_per_prompt = 8
k = [1, 8]
[[eval.set]]
name = "easy"
path = "easy.jsonl"
[[eval.set]]
name = "hard"
path = ["a.jsonl", "b.jsonl"]
samples_per_prompt = 16
k = [16]
temperature = 1.0
max_response_tokens = 7
"""


def test_a_set_takes_what_it_lacks_from_the_table(config_of):
    plain, easy, hard = held_out_sets(config_of(SETS))
    assert [each.prefix for each in (plain, easy, hard)] == ["eval/", "eval/easy/", "eval/hard/"]
    assert (easy.samples_per_prompt, easy.k, easy.temperature, easy.max_response_tokens) == (
        8,
        [1, 8],
        0.6,
        99,
    )
    assert (hard.samples_per_prompt, hard.k, hard.temperature, hard.max_response_tokens) == (16, [16], 1.0, 7)
    assert plain.path == "held.jsonl"
    assert hard.path == ["a.jsonl", "b.jsonl"]


def test_without_files_there_is_nothing_to_evaluate(config_of):
    assert held_out_sets(config_of("")) == []


def test_sets_are_written_as_they_are_read(config_of):
    config = config_of(SETS)
    assert config_of(dump_toml(config)) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[data]\nvalidation = 'v.jsonl'\n[eval]\nk = [1, 4]",
            "4: eval.k: got [1, 4], expected at most samples_per_prompt (1): pass@k is measured on at least k responses.",
        ),
        (
            SETS + "[[eval.set]]\nname = 'small'\npath = 's.jsonl'\nsamples_per_prompt = 4",
            "eval.set.small.k: got [1, 8], expected at most samples_per_prompt (4)",
        ),
        (
            "[data]\nvalidation = 'v.jsonl'\n[eval]\nsamples_per_prompt = 4",
            "4: eval.samples_per_prompt: got 4 with temperature 0: a greedy sampler gives a prompt the same response",
        ),
        (
            "[[eval.set]]\nname = 'a'\npath = 'a'\n[[eval.set]]\nname = 'a'\npath = 'b'",
            "eval.set.a: 'a' is listed 2 times, expected once.",
        ),
        (
            "[[eval.set]]\nname = 'validation'\npath = 'a'",
            "eval.set.validation.name: 'validation' is the name of data.validation in files. Rename the set.",
        ),
        (
            "[[eval.set]]\nname = 'a/b'\npath = 'a'",
            "eval.set.\"a/b\".name: got 'a/b', expected a text that matches",
        ),
        (
            "[[eval.set]]\nname = 'a'\npath = 'a'\nsample_per_prompt = 2",
            "4: eval.set.a.sample_per_prompt: unknown key. Did you mean 'samples_per_prompt'?",
        ),
        (
            "[[eval.set]]\nname = 'a'\npath = 'a'\nk = [0]",
            "4: eval.set.a.k.0: got 0, expected a number above 0",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(problems_of, text, expected):
    assert expected in "\n".join(problems_of(text))


SOURCES = """
[[eval.set]]
name = "few"
source = "squares"
[[eval.set]]
name = "many"
source = "dist:squares"
rewards = ["math"]
stop = ["\\n"]
chat_template = true
[eval.set.squares]
count = 30
"""


def test_each_set_of_a_data_source_has_its_own_options(config_of):
    few, many = held_out_sets(config_of(SOURCES))
    assert (few.path, few.source, few.options.count) == ([], "squares", 8)
    assert (many.source, many.options.count) == ("dist:squares", 30)
    assert (few.stop, many.stop, many.rewards) == ((), ("\n",), ["math"])


def test_what_ends_a_response_is_that_of_the_set_of_eval_or_of_rollout(config_of):
    of_rollout = "[data]\nvalidation = 'v.jsonl'\n[rollout]\nstop = ['a']\n"
    plain, few, many = held_out_sets(config_of(of_rollout + SOURCES))
    assert (plain.stop, few.stop, many.stop) == (("a",), ("a",), ("\n",))
    plain, few, many = held_out_sets(config_of(of_rollout + "[eval]\nstop = []\n" + SOURCES))
    assert (plain.stop, few.stop, many.stop) == ((), (), ("\n",))


def test_sets_of_data_sources_are_written_as_they_are_read(config_of):
    config = config_of(SOURCES)
    assert as_data(config)["eval"]["set"][1]["squares"] == {"count": 30}
    assert config_of(dump_toml(config)) == config


def test_the_columns_of_the_runs_rows_are_not_those_of_another_source(config_of):
    config = config_of(
        "[data]\nformat = 'prompt'\n[data.columns]\nprompt = 'q'\n" + SOURCES + SETS[SETS.index("[[") :]
    )
    few, many, easy, _ = (held_out.data(config) for held_out in held_out_sets(config))
    assert (few.format, few.columns.prompt, few.chat_template) == ("auto", "prompt", None)
    assert many.chat_template is True
    assert (easy.format, easy.columns.prompt) == ("prompt", "q")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("count = 0", "12: eval.set.many.squares.count: got 0, expected a number above 0."),
        ("cuont = 3", "12: eval.set.many.squares.cuont: unknown key. Did you mean 'count'?"),
    ],
)
def test_a_wrong_option_of_a_set_is_named_with_its_line(problems_of, text, expected):
    (found,) = problems_of(SOURCES.replace("count = 30", text))
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", "1: eval.set.a: expected either files in path, or the name of a data source in source"),
        ("path = 'a'\nsource = 'squares'", "1: eval.set.a: expected either files in path, or the name"),
        (
            "source = 'squares'\n[eval.set.squars]",
            "4: eval.set.a.squars: unknown key. Did you mean 'squares'?",
        ),
    ],
)
def test_a_set_has_files_or_a_data_source(problems_of, keys, expected):
    (found,) = problems_of(f"[[eval.set]]\nname = 'a'\n{keys}")
    assert found.startswith(expected)


def test_a_set_of_plain_text_has_nothing_of_the_chat_template(config_of):
    data = "[data]\nsystem = 's'\nchat_template_kwargs = { thinking = false }\n"
    plain = "[[eval.set]]\nname = 'plain'\nsource = 'squares'\nchat_template = false\n"
    few, _, last = (
        each.data(config) for config in [config_of(data + SOURCES + plain)] for each in held_out_sets(config)
    )
    assert (few.system, few.chat_template_kwargs) == ("s", {"thinking": False})
    assert (last.chat_template, last.system, last.chat_template_kwargs) == (False, None, {})


def test_a_resolved_set_still_takes_what_the_table_gets_later(config_of):
    resolved = dump_toml(config_of(SETS))
    _, easy, hard = held_out_sets(config_of(resolved.replace("temperature = 0.6", "temperature = 0.9")))
    assert (easy.temperature, hard.temperature) == (0.9, 1.0)


def test_sets_of_one_name_are_refused_for_a_trainer_that_samples_nothing(problems_of):
    sets = "[[eval.set]]\nname = 'a'\npath = 'a'\n[[eval.set]]\nname = 'a'\npath = 'b'"
    assert "'a' is listed 2 times, expected once" in "\n".join(problems_of(f"trainer = 'sft'\n{sets}"))
