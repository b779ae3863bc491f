"""Verdicts that a model writes: its questions, the number of votes, and how its answers are read."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_core.config.rewards import JudgeConfig
from engine_core.errors import DataError
from engine_plugin_rewards.models.judge import VerdictReader

ANY = {chr(c): float(c) for c in range(32, 127)} | {"\ufffd": -1.0}
WORDS = ["", "4", "four", "7" * 30]


def reader(**settings):
    return VerdictReader(JudgeConfig(path="x", prompt="{completion}", **settings))


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({}, "I give it 3 of 10, no: 7.5", 7.5),
        ({}, "Score: -2.", -2.0),
        ({}, "no idea", None),
        ({}, "", None),
        ({}, "9" * 400, None),
        ({"scale": [0, 10]}, "Score: 7", 0.7),
        ({"scale": [1, 5]}, "1", 0.0),
        ({"scale": [1, 5]}, "Score: 10", None),  # out of bounds, and not clipped to a full mark
        ({"pattern": r"Score: (\d+)"}, "Score: 3. Not 9", 3.0),
        ({"pattern": r"Score: (\d+)"}, "score 9", None),
        ({"pattern": r"Score: (\w+)"}, "Score: nan", None),
        ({"pattern": r"Score: (\S+)"}, "Score: 1e999", None),
        ({"pattern": r"a(b)?"}, "a", None),
        ({"verdicts": {"right": 1, "wrong": 0}}, "It looks wrong ... RIGHT.", 1.0),
        ({"verdicts": {"right": 1, "not right": 0}}, "That is not right", 0.0),
        ({"verdicts": {"right": 1, "wrong": 0}}, "outright wrongly", None),  # whole words only
        ({"verdicts": {"A": 1, "B": 0}, "pattern": r"\[\[(.)\]\]"}, "A or B? [[b]]", 0.0),
        ({"verdicts": {"A": 1, "B": 0}, "pattern": r"\[\[(.)\]\]"}, "[[C]]", None),
    ],
)
def test_the_last_verdict_counts(settings, text, expected):
    assert reader(**settings).read(text) == expected


@pytest.fixture
def judge_folder(folder_of):
    return folder_of("judge", kind=folder_of.language_model)


def greedy(path, tokenizer, word, most):
    """Return what transformers writes, decoded as a rollout's text is."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.tensor([tokenizer(f"<|user|>Is {word} right?<eos>\n<|assistant|>")["input_ids"]])
    done = model.generate(ids, max_new_tokens=most, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_reward_is_read_from_what_the_model_writes(asking, judge_folder, tokenizer):
    """Any byte is a verdict, so that a random model gives one."""
    settings = {"pattern": "(?s).", "verdicts": ANY}
    judge = asking("judge", judge_folder, prompt="Is {completion} right?", max_response_tokens=9, **settings)
    outcomes = judge.score({"completion": WORDS}, len(WORDS))
    texts = [greedy(judge_folder, tokenizer, word, 9) for word in WORDS]
    read = VerdictReader(JudgeConfig(path="x", prompt="{completion}", **settings))
    assert [o.value for o in outcomes] == [read.read(text) for text in texts]
    missing = [o.failure for o in outcomes].count("error")
    assert judge.metrics() == {"unreadable": missing / len(WORDS)}
    assert missing < len(WORDS)


def test_tokens_of_an_engine_that_makes_no_text_are_made_text(asking, judge_folder):
    judge = asking(
        "judge",
        judge_folder,
        prompt="Is {completion} right?",
        max_response_tokens=9,
        pattern="(?s).",
        verdicts=ANY,
    )
    expected = judge.score({"completion": WORDS}, len(WORDS))
    generate = judge.generate
    judge.generate = lambda requests: [dataclasses.replace(made, text="") for made in generate(requests)]
    assert judge.score({"completion": WORDS}, len(WORDS)) == expected
    assert any(outcome.value is not None for outcome in expected)


def test_an_answer_ends_at_the_end_tokens_of_the_judge(asking, judge_folder, tokenizer):
    ends = sorted(set(range(300)) - {*tokenizer.all_special_ids})
    (Path(judge_folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    judge = asking("judge", judge_folder, prompt="{completion}", max_response_tokens=9)
    generate, made = judge.generate, []
    judge.generate = lambda requests: made.extend(generate(requests)) or made
    judge.score({"completion": WORDS}, len(WORDS))
    assert {rollout.finish_reason for rollout in made} == {"stop"}
    assert {rollout.response_length for rollout in made} == {1}


def test_an_answer_without_a_verdict_is_a_failure_that_quotes_it(asking, judge_folder, tokenizer):
    judge = asking(
        "judge", judge_folder, prompt="Is {completion} right?", max_response_tokens=4, pattern="never ever"
    )
    (outcome,) = judge.score({"completion": ["4"]}, 1)
    shown = greedy(judge_folder, tokenizer, "4", 4)
    assert (outcome.failure, outcome.message) == ("error", f"no verdict in the judge's answer: {shown!r}")


def test_votes_are_averaged_and_do_not_depend_on_company_or_order(asking, judge_folder):
    settings = {"pattern": "(?s).", "verdicts": ANY}
    judge = asking(
        "judge",
        judge_folder,
        prompt="Is {completion} right?",
        max_response_tokens=6,
        votes=5,
        temperature=1.0,
        **settings,
    )
    first = [o.value for o in judge.score({"completion": WORDS}, len(WORDS))]
    turned = [o.value for o in judge.score({"completion": WORDS[::-1]}, len(WORDS))]
    assert turned[::-1] == first
    assert [o.value for o in judge.score({"completion": [WORDS[1]]}, 1)] == [first[1]]
    assert any(value is not None and value != int(value) for value in first)  # a mean of different votes


def test_a_vote_that_cannot_be_read_leaves_the_others(asking, judge_folder):
    judge = asking(
        "judge", judge_folder, prompt="{completion}", votes=2, temperature=1.0, max_response_tokens=9
    )
    texts = iter(["Score 4", "hm", "hm", "hm"])
    judge.generate = lambda requests: [type("R", (), {"text": next(texts)})() for _ in requests]
    outcomes = judge.score({"completion": ["a", "b"]}, 2)
    assert (outcomes[0].value, outcomes[1].failure) == (4.0, "error")
    assert judge.metrics() == {"unreadable": 0.75}


def test_a_question_must_leave_room_for_the_answer(asking, judge_folder):
    with pytest.raises(
        DataError, match=r"reward\.r\.judge\.max_response_tokens: 256 leaves no room .* in the 128 tokens"
    ):
        asking("judge", judge_folder, prompt="{completion}")
    judge = asking("judge", judge_folder, prompt="{completion}", max_response_tokens=100)
    (outcome,) = judge.score({"completion": ["x" * 30]}, 1)
    assert outcome.message.endswith("takes 1 to 28 (max_tokens)")
