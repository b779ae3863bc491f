"""The reward ``http`` against a real server that misbehaves: recovery, failures, secrets."""

import logging
import socket
import time
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from engine_core import load_config
from engine_core.config.rewards import RewardConfig
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_core.types import Prompt, Rollout
from engine_plugin_rewards.http_scorer import make_http, read_scores
from engine_plugin_rewards.plugin import HTTPOptions

QUICK = {"attempt_timeout_seconds": 10.0, "backoff_seconds": 0.01, "retries": 2}
WORDS = ["a", "bb", "ccc"]


def http(url, timeout=30.0, **options):
    settings = HTTPOptions(url=url, **{**QUICK, **options})
    return make_http(**settings.model_dump(), timeout=timeout)


def ask(url, words=WORDS, **options):
    return http(url, **options)(prompts=["Q"] * len(words), completions=list(words))


def status(code, body=b"no", headers=()):
    return lambda handler, sent: handler.answer(body, code, headers)


def body(text):
    return lambda handler, sent: handler.answer(text if isinstance(text, bytes) else text.encode())


def hang_up(handler, sent):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def break_off(handler, sent):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [1')
    hang_up(handler, sent)


def sleep_for(seconds):
    return lambda handler, sent: time.sleep(seconds)


def drip(handler, sent):
    """Send a byte at a time, each well within the timeout of a socket."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    try:
        for _ in range(200):
            handler.wfile.write(b" ")
            time.sleep(0.02)
    except OSError:
        handler.close_connection = True


def flood(handler, sent):
    """Send more than is allowed, without a length."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    try:
        for _ in range(1000):
            handler.wfile.write(b"[" * 100_000)
    except OSError:
        pass


def dead():
    """Return an address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/score"


def test_samples_go_out_in_batches_and_scores_come_back_in_their_order(scorer_server):
    server = scorer_server()
    words = ["x" * n for n in range(10)]
    assert ask(server.url, words, batch_size=3) == [float(n) for n in range(10)]
    assert sorted(len(sent["completions"]) for sent in server.bodies) == [1, 3, 3, 3]
    assert server.bodies[0].keys() == {"prompts", "completions", "columns"}
    assert ask(server.url, []) == []


def test_columns_that_are_named_are_sent_and_conversations_always(scorer_server):
    server = scorer_server()
    chat = [[{"role": "user", "content": "Q"}]]
    function = http(server.url, columns=["answer"])
    function(prompts=["Q"], completions=["a"], answer=["é"], messages=chat)
    assert server.bodies == [
        {"prompts": ["Q"], "completions": ["a"], "columns": {"answer": ["é"], "messages": chat}}
    ]


def test_no_more_requests_run_at_once_than_connections(scorer_server):
    def slowly(handler, sent):
        time.sleep(0.05)
        scorer_server.lengths(handler, sent)

    server = scorer_server(slowly)
    assert ask(server.url, ["ab"] * 12, batch_size=1, connections=3) == [2.0] * 12
    assert 1 < server.most <= 3


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(503),
        status(503, headers=[("Retry-After", "soon")]),
        status(503, headers=[("Retry-After", "9" * 5000)]),
        status(503, headers=[("Retry-After", "Mon, 01 Jan 99999 00:00:00 GMT")]),
        status(429),
        hang_up,
        break_off,
        sleep_for(4),
        drip,
    ],
    ids=[
        "500",
        "503",
        "no such pause",
        "too long",
        "no year",
        "429",
        "hangs up",
        "breaks off",
        "no answer in time",
        "drips",
    ],
)
def test_what_may_pass_is_tried_again(scorer_server, fault):
    server = scorer_server(fault, scorer_server.lengths)
    assert ask(server.url, attempt_timeout_seconds=2.0) == [1.0, 2.0, 3.0]
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("way", "options", "message"),
    [
        (status(400, b"what?"), {}, r"status 400: 'what\?'"),
        (status(302, b"", [("Location", "http://example.invalid/")]), {}, "status 302"),
        (body("<html>Not found</html>"), {}, "the response is no JSON: '<html>Not found</html>'; expected"),
        (body("[" * 100_000), {}, "the response is no JSON"),
        (
            body('{"scores": [1, 2]}'),
            {},
            "the response has 2 scores; expected .* with 3 finite numbers or nulls",
        ),
        (body('{"rewards": [1, 2, 3]}'), {}, "the response has .*rewards"),
        (body("[1, 2, 3]"), {}, "the response has"),
        (body('{"scores": [1, 2, 3], "errors": 7}'), {}, "errors are no object"),
        (body(b" " * 3000), {"max_response_kb": 2}, r"longer than 2 KB \(max_response_kb\)"),
        (flood, {}, "longer than 1024 KB"),
    ],
)
def test_what_will_not_pass_fails_at_once_for_every_sample(scorer_server, way, options, message):
    server = scorer_server(way)
    found = ask(server.url, **options)
    assert len(found) == 3
    for error in found:
        with pytest.raises(Exception, match=message) as raised:
            raise error
        assert type(raised.value).__name__ == "ScorerError"
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("NaN", "score 1 of the response is nan, not finite"),
        ("1e999", "score 1 of the response is inf, not finite"),
        ("9" * 400, "score 1 of the response is inf, not finite"),
        ('"2"', "score 1 of the response is '2', expected a number or null"),
        ("true", "score 1 of the response is 'True', expected a number or null"),
    ],
)
def test_a_score_that_is_no_number_fails_its_sample_alone(scorer_server, score, message):
    found = ask(scorer_server(body(f'{{"scores": [1, {score}, null]}}')).url)
    assert (found[0], str(found[1]), found[2]) == (1.0, message, None)


def test_samples_that_the_server_names_fail_alone():
    found = read_scores(b'{"scores": [1, null], "errors": {"1": "too long"}}', 2, str)
    assert (found[0], str(found[1])) == (1.0, "too long")


def test_a_batch_that_fails_leaves_the_others(scorer_server):
    def picky(handler, sent):
        status(400)(handler, sent) if "bb" in sent["completions"] else scorer_server.lengths(handler, sent)

    found = ask(scorer_server(picky).url, batch_size=1)
    assert (found[0], found[2]) == (1.0, 3.0)
    assert "status 400" in str(found[1])


def test_tries_come_to_an_end_and_say_what_the_last_one_met(scorer_server):
    assert {str(e) for e in ask(scorer_server(status(503, b"busy")).url)} == {
        "status 503: 'busy' (try 3 of 3)"
    }
    assert all("no connection: " in str(e) and "refused" in str(e) for e in ask(dead()))


def test_a_server_that_asks_for_a_pause_gets_it(scorer_server):
    server = scorer_server(status(429, b"", [("Retry-After", "1")]), scorer_server.lengths)
    assert ask(server.url) == [1.0, 2.0, 3.0]
    assert server.seen[1][2] - server.seen[0][2] >= 1.0


def test_the_time_of_the_reward_bounds_all_tries_together(scorer_server):
    server = scorer_server(sleep_for(0.6))
    begun = time.monotonic()
    found = ask(server.url, timeout=1.0, attempt_timeout_seconds=0.4, retries=50, backoff_seconds=0.2)
    assert {type(error) for error in found} == {TimeoutError}
    assert len(server.seen) < 5  # not fifty
    assert time.monotonic() - begun < 60
    asked = ask(scorer_server(status(429, b"", [("Retry-After", "3600")])).url, timeout=1.0)
    assert "no time is left for another" in str(asked[0])


def test_a_request_that_waits_for_a_connection_keeps_all_its_time(scorer_server):
    def slowly(handler, sent):
        time.sleep(0.4)
        scorer_server.lengths(handler, sent)

    begun = time.monotonic()
    found = ask(scorer_server(slowly).url, ["ab"] * 12, timeout=2.0, batch_size=1, connections=2)
    assert found == [2.0] * 12
    assert time.monotonic() - begun > 2.0


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"connections": 3, "batch_size": 5}, 15.0),
        ({"connections": 3, "batch_size": 5, "columns": ["group_ids"]}, None),
        ({"connections": 3, "chat": {"model": "m", "prompt": "{completion}"}}, 3.0),
        (
            {
                "connections": 3,
                "chat": {"model": "m", "prompt": "{completion}", "votes": 2, "temperature": 1.0},
            },
            1.5,
        ),
    ],
)
def test_the_reward_says_how_many_samples_are_asked_about_in_the_time_of_one_request(options, samples):
    assert http("http://127.0.0.1/", **options).samples_per_timeout == samples


def test_group_rewards_are_posted_whole(scorer_server):
    server = scorer_server()
    function = http(server.url, columns=["group_ids"], batch_size=2)
    function(prompts=["Q"] * 5, completions=["a"] * 5, group_ids=[0] * 5)
    assert [len(sent["completions"]) for sent in server.bodies] == [5]


# -- secrets ----------------------------------------------------------------


def test_the_token_is_sent_and_in_no_message(scorer_server, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "s3cr3t-value")

    def echo(handler, sent):
        handler.answer(f"bad header {handler.headers['Authorization']}".encode(), 401)

    server = scorer_server(echo)
    (error,) = ask(server.url, ["a"], token_env="SCORER_TOKEN")
    assert server.seen[0][1]["Authorization"] == "Bearer s3cr3t-value"
    assert str(error) == "status 401: 'bad header Bearer [redacted]'"
    of_sample = body('{"scores": [null], "errors": {"0": "bad header Bearer s3cr3t-value"}}')
    (error,) = ask(scorer_server(of_sample).url, ["a"], token_env="SCORER_TOKEN")
    assert str(error) == "bad header Bearer [redacted]"


@pytest.mark.parametrize("value", [None, "", "two words", "line\nbreak", "schlüssel"])
def test_a_variable_without_a_token_is_refused_by_name_alone(monkeypatch, value):
    monkeypatch.delenv("SCORER_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("SCORER_TOKEN", value)
    with pytest.raises(ConfigError, match=r"token_env: \$SCORER_TOKEN") as error:
        http("http://127.0.0.1/", token_env="SCORER_TOKEN")
    assert not value or value not in str(error.value)


# -- options ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000/score"}, "expected http://HOST:PORT/PATH"),
        ({"url": "localhost/score"}, "expected http://HOST:PORT/PATH"),
        ({"url": "file:///etc/passwd"}, "expected http://HOST:PORT/PATH"),
        ({"url": "ftp://host/score"}, "expected http://HOST:PORT/PATH"),
        ({"url": "http:///score"}, "expected http://HOST:PORT/PATH"),
        ({"url": "http://host:port/"}, "Port could not be cast"),
        (
            {"url": "http://me:pw@host/"},
            "a name, password or token in the address would be written down; set token_env",
        ),
        ({"url": "http://h/score?api_key=abc"}, "a name, password or token in the address"),
        ({"url": "http://h/", "token_env": "SCORER"}, "would not be kept out of logs"),
        ({"url": "http://h/", "columns": ["completions"]}, "cannot be a column here"),
        ({"url": "http://h/", "columns": ["a b"]}, "cannot be a column here"),
        ({"url": "http://h/", "batch_size": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        HTTPOptions(**options)


def test_an_address_without_a_scheme_is_refused_with_the_line_of_the_run_file(tmp_path):
    (tmp_path / "run.toml").write_text('[[reward]]\nname = "http"\n[reward.http]\nurl = "localhost:8000"\n')
    with pytest.raises(
        ConfigError, match=r"run\.toml:4: reward\.http\.url: got 'localhost:8000'.*expected http://HOST"
    ):
        load_config(tmp_path / "run.toml")


# -- in a run's runner ------------------------------------------------------


def rollouts(words):
    return [
        Rollout(
            request_id=f"r{i}",
            prompt=Prompt(f"train:{i}", [7, 8], "Q", {"answer": word}),
            token_ids=torch.tensor([7, 8, 9]),
            loss_mask=torch.tensor([False, False, True]),
            rollout_log_probs=torch.zeros(3),
            policy_versions=torch.zeros(3, dtype=torch.int32),
            finish_reason="stop",
            group_id=i,
            text=word,
        )
        for i, word in enumerate(words)
    ]


@pytest.fixture
def runner():
    made = []

    def make(url, timeout=30.0, options=(), **settings):
        table = HTTPOptions(url=url, **{**QUICK, **dict(options)})
        config = RewardConfig(name="http", options=table, timeout_seconds=timeout, **settings)
        made.append(RewardRunner([config], PluginSet.load({"rewards": ["http"]}, [], Path.cwd())))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_runs_rewards_are_the_servers_scores(runner, scorer_server, workers):
    batch = rollouts(WORDS)
    metrics = runner(scorer_server().url, workers=workers).score(batch, 1)
    assert [r.rewards["http"] for r in batch] == [1.0, 2.0, 3.0]
    assert metrics["reward/http"] == 2.0


def test_a_dead_server_ends_the_run_with_its_reason_or_follows_the_policy(runner, caplog):
    url = dead()
    with pytest.raises(
        TrainingFailed, match=r"Reward 'http' failed on .* samples of step 1.* no connection: .*refused"
    ):
        runner(url).score(rollouts(WORDS), 1)
    batch = rollouts(WORDS)
    with caplog.at_level(logging.WARNING, "engine"):
        metrics = runner(url, on_error="zero", max_failure_share=1.0).score(batch, 2)
    assert [r.reward for r in batch] == [0.0] * 3
    assert metrics["reward/http/errors"] == 3.0
    assert metrics["reward/http/restarts"] == 0.0  # no worker was lost for it


def test_a_slow_server_is_a_time_out_of_its_samples_and_costs_no_worker(runner, scorer_server):
    batch = rollouts(WORDS)
    one = runner(scorer_server(sleep_for(2)).url, timeout=1.0, max_failure_share=1.0, on_timeout="drop")
    metrics = one.score(batch, 1)
    assert (metrics["reward/http/timeouts"], metrics["reward/http/restarts"]) == (3.0, 0.0)
    assert not any(r.valid for r in batch)


def test_a_call_of_several_rounds_costs_no_worker(runner, scorer_server):
    def slowly(handler, sent):
        time.sleep(0.6)
        scorer_server.lengths(handler, sent)

    batch = rollouts(["ab"] * 12)
    one = runner(scorer_server(slowly).url, timeout=2.0, options={"batch_size": 1, "connections": 2})
    begun = time.monotonic()
    metrics = one.score(batch, 1)
    assert time.monotonic() - begun > 3.5  # longer than a call of one round may take
    assert [r.rewards["http"] for r in batch] == [2.0] * 12
    assert (metrics["reward/http/timeouts"], metrics["reward/http/restarts"]) == (0.0, 0.0)


def test_a_missing_column_is_refused_before_anything_is_sent(runner, scorer_server):
    server = scorer_server()
    one = runner(server.url, options={"columns": ["solution"]})
    with pytest.raises(Exception, match="Reward 'http' needs 'solution', which is no column of the data"):
        one.check_columns({"answer"})
    one = runner(server.url, options={"columns": ["answer"]})
    one.check_columns({"answer"})
    one.score(rollouts(WORDS), 1)
    assert server.bodies[0]["columns"] == {"answer": server.bodies[0]["completions"]}
