"""``[reward.http.chat]``: the question to the judge, and how its answer is read."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine_core import load_config
from engine_core.config.rewards import RewardConfig
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_plugin_rewards.http_scorer import Chat, ScorerError, make_http
from engine_plugin_rewards.plugin import ChatOptions, HTTPOptions

TABLE = {"model": "judge", "prompt": "Q: {question}\nA: {completion}\nRight: {answer}"}


def says(text):
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def judge(url, **options):
    settings = HTTPOptions(url=url, chat=ChatOptions(**TABLE | options), retries=0)
    values = {name: getattr(settings, name) for name in HTTPOptions.model_fields}
    return make_http(**values, timeout=30.0)


def test_each_sample_is_one_question_and_its_verdict_the_reward(scorer_server):
    def answer(handler, sent):
        asked = sent["messages"][-1]["content"]
        handler.answer(says("Score 1. No: Score " + ("10" if "A: good" in asked else "4")))

    server = scorer_server(answer)
    ask = judge(server.url, system="You judge.", scale=(1.0, 10.0), max_tokens=7, pattern=r"Score (\d+)")
    chat = [[{"role": "user", "content": "why?"}]] * 3
    found = ask(
        prompts=["P"] * 3, completions=["good", "{answer}", "x"], answer=["é", "2", None], messages=chat
    )
    assert found == [1.0, pytest.approx(1 / 3), None]  # a row without the answer is not judged
    (first,) = [body for body in server.bodies if "good" in body["messages"][1]["content"]]
    assert first == {
        "model": "judge",
        "messages": [
            {"role": "system", "content": "You judge."},
            {"role": "user", "content": "Q: why?\nA: good\nRight: é"},
        ],
        "max_tokens": 7,
        "temperature": 0.0,
    }
    (other,) = [body for body in server.bodies if body is not first]
    assert other["messages"][1]["content"] == "Q: why?\nA: {answer}\nRight: 2"  # as it is


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (says("I would rather not."), "no verdict in the judge's answer: 'I would rather not.'"),
        (says("11"), "no verdict in the judge's answer: '11'"),
        (says("-1"), "no verdict in the judge's answer: '-1'"),
        (says(None), "the response is no chat completion"),
        (b'{"choices": []}', "the response is no chat completion"),
        (b'{"choices": {"0": 1}}', "the response is no chat completion"),
        (b"[" * 50_000, "the response is no chat completion"),
        (b'{"error": "no such model"}', "the response is no chat completion: .*no such model"),
    ],
)
def test_an_answer_without_a_verdict_is_a_failure(scorer_server, body, message):
    server = scorer_server(lambda handler, sent: handler.answer(body))
    (error,) = judge(server.url, scale=(0.0, 10.0))(prompts=["P"], completions=["a"], answer=["2"])
    with pytest.raises(Exception, match=message):
        raise error


def test_a_verdict_beyond_all_numbers_is_a_failure():
    with pytest.raises(ScorerError, match="no verdict"):
        Chat(ChatOptions(**TABLE)).read(says("9" * 400), lambda text, last=False: text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "Is it right?"}, r"\{completion\} is missing"),
        ({"pattern": "(a"}, "not a regular expression"),
        ({"scale": (2.0, 1.0)}, r"expected \[low, high\]"),
        ({"votes": 3}, "votes = 3 with temperature = 0 gives the same answer each time"),
        ({"votes": 0}, "greater than 0"),
    ],
)
def test_a_table_that_cannot_work_is_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        ChatOptions(**TABLE | options)


def test_the_reward_is_the_mean_of_the_votes_that_can_be_read(scorer_server):
    answers = iter(["6", "none", "9"] + ["none"] * 3)
    server = scorer_server(lambda handler, sent: handler.answer(says(next(answers))))
    ask = judge(server.url, votes=3, temperature=0.7)
    assert ask(prompts=["P"], completions=["a"], answer=["2"]) == [7.5]
    (error,) = ask(prompts=["P"], completions=["a"], answer=["2"])
    assert "no verdict" in str(error)
    assert len(server.bodies) == 6
    assert {body["temperature"] for body in server.bodies} == {0.7}
    assert ask(prompts=["P"], completions=["a"], answer=[None]) == [None]


def test_each_sample_has_votes_of_its_own(scorer_server):
    server = scorer_server(
        lambda handler, sent: handler.answer(says(sent["messages"][0]["content"].split("A: ")[1][0]))
    )
    ask = judge(server.url, votes=4, temperature=1.0)
    assert ask(prompts=["P"] * 5, completions=list("31415"), answer=["x"] * 5) == [3.0, 1.0, 4.0, 1.0, 5.0]
    assert len(server.bodies) == 20


def test_a_secret_that_the_judge_says_at_the_end_is_not_shown_in_part(scorer_server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k" * 300)
    server = scorer_server(
        lambda handler, sent: handler.answer(says("so " + handler.headers["Authorization"]))
    )
    options = HTTPOptions(url=server.url, chat=ChatOptions(**TABLE), retries=0, token_env="JUDGE_KEY")
    values = {name: getattr(options, name) for name in HTTPOptions.model_fields}
    (error,) = make_http(**values, timeout=30.0)(prompts=["P"], completions=["a"], answer=["2"])
    assert str(error) == "no verdict in the judge's answer: 'so Bearer [redacted]'"


def test_the_table_stands_in_a_run_file(tmp_path):
    table = '[[reward]]\nname = "http"\n[reward.http]\nurl = "http://localhost:8000/v1/chat/completions"\n'
    chat = '[reward.http.chat]\nmodel = "judge"\nprompt = "{completion}?"\n'
    Path(tmp_path / "run.toml").write_text(table + chat)
    (reward,) = load_config(tmp_path / "run.toml").reward
    assert reward.options.chat.prompt == "{completion}?"


def test_a_worker_of_a_run_asks_the_judge(scorer_server):
    server = scorer_server(lambda handler, sent: handler.answer(says("It is a 7.")))
    options = HTTPOptions(url=server.url, chat=ChatOptions(**TABLE))
    config = RewardConfig(name="http", options=options, timeout_seconds=30.0)
    one = RewardRunner([config], PluginSet.load({"rewards": ["http"]}, [], Path()))
    outcomes = {
        "prompts": ["P", "P"],
        "completions": ["a", "b"],
        "answer": ["2", "2"],
        "messages": [None, None],
    }
    one.ask({"http": outcomes}, 2, lambda *failed: pytest.fail(str(failed)))
    assert [outcome.value for outcome in one.pools[0].outcomes] == [7.0, 7.0]
    one.close()
    assert len(server.seen) == 2
