"""``[eval]`` and ``[[eval.set]]``: what a set takes from the table above it, and what is refused."""

import pytest

from engine_core.config import dump_toml
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
