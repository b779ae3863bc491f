"""Servers that are not what a run needs, and answers that are not what was asked for: a fake of vLLM's server on loopback."""

import contextlib
import itertools
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from engine_core import load_config
from engine_core.errors import ConfigError, EnvironmentProblem, TrainingFailed
from engine_core.runs.rollout_files import read_rollouts
from engine_core.train.trainer import Trainer
from engine_core.types import Batch
from engine_plugin_testing.reference import SHAPE, tokenizer, write_model
from engine_plugin_vllm_rollout import server as servers
from engine_plugin_vllm_rollout.scoring import infer
from engine_plugin_vllm_rollout.served import Remote, read_given
from engine_plugin_vllm_rollout.server import Server, spread
from engine_plugin_vllm_rollout.server_options import VLLMServerOptions

TABLE = "reward.verdict.vllm_server"
VOCABULARY = 97
TOKENIZER = tokenizer()


class Fake(BaseHTTPRequestHandler):
    """Answers as vLLM does; of token t the log-prob of token u is that of ``law(t)[u]``."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.respond(None)

    def do_POST(self):
        self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def respond(self, asked):
        owner = self.server
        owner.asked.append((self.path, asked))
        if owner.faults.get(self.path):
            status, body = owner.faults[self.path].pop(0)
            if status:
                self.answer(body, status)
                return
            time.sleep(body)
        if (
            self.path.startswith("/v1")
            and owner.token
            and self.headers["Authorization"] != f"Bearer {owner.token}"
        ):
            self.answer({"error": "Unauthorized"}, 401)
            return
        made = getattr(self, self.path.rpartition("/")[2], None)
        self.answer({"detail": "Not Found"} if made is None else made(asked), 404 if made is None else 200)

    def version(self, asked):
        return {"version": self.server.release}

    def models(self, asked):
        return {"data": [{"id": name, "max_model_len": 32} for name in self.server.models]}

    def detokenize(self, asked):
        return {"prompt": TOKENIZER.decode(asked["tokens"])}

    def classify(self, asked):
        return {"data": [{"index": i, "probs": [sum(ids) / 7]} for i, ids in enumerate(asked["input"])]}

    def completions(self, asked):
        choices = [
            {"index": i, "prompt_logprobs": told(ids, asked["prompt_logprobs"])}
            for i, ids in enumerate(asked["prompt"])
        ]
        return {"choices": choices[::-1]}

    def answer(self, body, status=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked has gone
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def law(token):
    return torch.log_softmax(torch.cos(torch.arange(VOCABULARY, dtype=torch.float64) * (token + 1)) * 3, 0)


def told(ids, top):
    rows = [None]
    for before, token in itertools.pairwise(ids):
        found = law(before)
        best = found.topk(top).indices.tolist()
        rows.append({str(i): {"logprob": float(found[i]), "rank": 1} for i in dict.fromkeys([token, *best])})
    return rows


@pytest.fixture
def fake():
    """``fake(token=..., release=...)``: a server with ``url``, ``asked`` and ``faults``."""
    made = []

    def serve(token="", release="0.32.0", models=("tiny",), **faults):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        server.token, server.release, server.models, server.asked = token, release, models, []
        server.faults = {f"/{path.replace('__', '/')}": list(ways) for path, ways in faults.items()}
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        made.append(server)
        return server

    yield serve
    for server in made:
        server.shutdown()
        server.server_close()


def options_of(server, **settings):
    quick = {"attempt_timeout_seconds": 5.0, "retries": 1, "backoff_seconds": 0.01}
    return VLLMServerOptions(**({"url": server.url} | quick | settings))


def opened(server, **settings):
    made = Server(options_of(server, **settings), TABLE)
    made.check()
    made.check_tokens(TOKENIZER, "folder")
    return made


def batch(ids, last_only, **changes):
    lengths = torch.tensor([len(each) for each in ids])
    made = Batch(token_ids=torch.tensor(list(itertools.chain(*ids))), lengths=lengths, **changes)
    mask = torch.ones(made.num_tokens, dtype=torch.bool)
    mask[made.offsets[:-1]] = False
    if last_only:
        mask = torch.zeros_like(mask)
        mask[made.offsets[1:] - 1] = True
    return made.with_columns({"loss_mask": mask})


# -- before a run -----------------------------------------------------------


def test_a_server_is_looked_at_and_its_only_model_is_taken(fake, monkeypatch):
    monkeypatch.setenv("SERVED_TOKEN", "right")
    server = fake(token="right")
    for url in (server.url, f"{server.url}/", f"{server.url}/v1"):
        made = opened(server, token_env="SERVED_TOKEN", url=url)
        assert (made.model, made.room) == ("tiny", 32)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (
            {"version": [(404, {})]},
            ConfigError,
            r"url: http.* is no vLLM server: it has no /version \(status 404\)",
        ),
        ({"version": [(200, b"<html>")]}, ConfigError, r"is no vLLM server: /version gives '<html>'"),
        (
            {"version": [(503, {})] * 2},
            EnvironmentProblem,
            r"does not answer /version: status 503: .* \(try 2 of 2\)\. Start it",
        ),
        (
            {"release": "0.24.0"},
            ConfigError,
            r"vLLM 0\.24\.0 runs at http.*; the plugin works with 0\.25\.1 or newer",
        ),
        ({"token": "t"}, ConfigError, r"token_env: the server at http.* wants a token\. Put it into"),
        ({"models": ("a", "b")}, ConfigError, r"model: 2 models are served at"),
        ({"models": ()}, ConfigError, r"model: 0 models are served at"),
        (
            {"detokenize": [(200, {"prompt": "zzz"})]},
            ConfigError,
            r"has other tokens than 'folder': ids 0 to 96 are 'zzz' there",
        ),
        ({"detokenize": [(404, {})]}, ConfigError, r"has no /detokenize \(status 404\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_key_before_anything_is_asked_of_the_model(
    fake, settings, kind, words
):
    server = fake(**settings)
    with pytest.raises(kind, match=rf"\[reward\.verdict\.vllm_server\] .*{words}"):
        opened(server)
    assert not any(path.endswith("completions") for path, _ in server.asked)


def test_a_wrong_token_is_refused_by_its_variable_and_never_shown(fake, monkeypatch):
    monkeypatch.setenv("SERVED_TOKEN", "wr0ng-t0ken")
    with pytest.raises(
        ConfigError, match=r"the server at .* refuses the token of \$SERVED_TOKEN\."
    ) as refused:
        opened(fake(token="right"), token_env="SERVED_TOKEN")
    assert "wr0ng" not in str(refused.value)
    echo = fake(version=[(400, {"said": "wr0ng-t0ken"})])
    with pytest.raises(ConfigError, match=r"\[redacted\]") as refused:
        opened(echo, token_env="SERVED_TOKEN")
    assert "wr0ng" not in str(refused.value)
    monkeypatch.delenv("SERVED_TOKEN")
    with pytest.raises(ConfigError, match=r"\$SERVED_TOKEN is not set"):
        opened(echo, token_env="SERVED_TOKEN")


def test_a_model_that_is_not_served_is_told_with_the_nearest_one(fake):
    with pytest.raises(ConfigError, match=r"model: 'tini' is not served at .* Did you mean 'tiny'\?"):
        opened(fake(), model="tini")


def test_nobody_there_is_the_machine_s_problem_with_what_to_start(fake, monkeypatch):
    monkeypatch.setattr(servers, "START_SECONDS", 0.5)
    server = fake(version=[(0, 1.0)])
    with pytest.raises(EnvironmentProblem, match=r"does not answer: .* Start it: vllm serve"):
        opened(server)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "url"),
        ({"url": "http://127.0.0.1:1", "token_env": "SERVED"}, "would not be kept out of logs"),
    ],
)
def test_options_are_checked(table, words):
    with pytest.raises(ValidationError, match=words):
        VLLMServerOptions(**table)


# -- what it is asked -------------------------------------------------------


def test_its_answers_are_the_outputs_of_the_contract(fake):
    server = fake()
    model = Remote(opened(server, connections=3, batch_size=2))
    ids = [[5, 9, 7, 30], [8, 2], [4, 4, 4], [96, 1, 50, 2, 3]]
    rows = [torch.stack([law(t) for t in each[:-1]]) for each in ids]
    found = infer(
        model,
        batch(ids, False, top_k=6),
        ("log_probs", "top_ids", "top_log_probs", "top_log_rest"),
        VOCABULARY,
        "t",
    )
    start = 0
    for each, row in zip(ids, rows, strict=True):
        place = slice(start + 1, start + len(each))
        best = row.topk(6)
        own = row.gather(1, torch.tensor(each[1:])[:, None])[:, 0]
        torch.testing.assert_close(found["log_probs"][place], own.float())
        assert torch.equal(found["top_ids"][place], best.indices)
        torch.testing.assert_close(found["top_log_probs"][place], best.values.float())
        rest = torch.log(1 - best.values.exp().sum(-1))
        torch.testing.assert_close(found["top_log_rest"][place], rest.float(), atol=1e-5, rtol=1e-5)
        assert not found["top_log_probs"][start].any()
        start += len(each)
    asked = batch(ids, True).with_columns({"candidate_ids": torch.tensor([11, 3]).expand(14, -1)})
    found = infer(model, asked, ("log_probs_at", "log_rest"), VOCABULARY, "t")
    last = asked.offsets[1:] - 1
    expected = torch.stack([law(each[-2])[[11, 3]] for each in ids])
    torch.testing.assert_close(found["log_probs_at"][last], expected.float())
    torch.testing.assert_close(found["log_rest"][last], torch.log(1 - expected.exp().sum(-1)).float())
    scores = infer(model, batch(ids, True), ("scores",), VOCABULARY, "t")["scores"]
    assert scores[last].tolist() == pytest.approx([sum(each) / 7 for each in ids])
    assert infer(model, batch([[1]], True).select([]), ("scores",), VOCABULARY, "t")["scores"].shape == (0,)
    assert {body["model"] for path, body in server.asked if path == "/v1/completions"} == {"tiny"}


def test_what_passes_is_tried_again_and_what_does_not_ends_the_run_with_its_cause(fake):
    path = "v1__completions"
    once = Remote(opened(fake(**{path: [(503, {})]})))
    assert len(list(once.given([[1, 2]], 0))) == 1
    gone = Remote(opened(fake(**{path: [(503, {})] * 2})))
    with pytest.raises(
        TrainingFailed, match=r"does not answer: status 503: .* \(try 2 of 2\)\. The last checkpoint is good"
    ):
        list(gone.given([[1, 2]], 0))
    late = Remote(opened(fake(**{path: [(0, 1.0)] * 2}), attempt_timeout_seconds=0.2))
    with pytest.raises(TrainingFailed, match=r"no whole answer within 0\.2 s"):
        list(late.given([[1, 2]], 0))
    few = {"message": "Requested prompt logprobs of 9, which is greater than max allowed: 2"}
    refused = Remote(opened(fake(**{path: [(400, few)]})))
    with pytest.raises(ConfigError, match=r"refuses /v1/completions: .*greater than max allowed"):
        list(refused.given([[1, 2]], 9))
    long = Remote(opened(fake()))
    with pytest.raises(ConfigError, match=r"a sequence has 32 tokens, and vLLM holds 32 with one more"):
        list(long.given([[1] * 32], 1))


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"index": 0, "prompt_logprobs": [None]}]},
        {"choices": [{"index": 0, "prompt_logprobs": [None, {"7": {"logprob": -1}}]}]},
        {"choices": [{"index": 0, "prompt_logprobs": [None, None]}]},
        [],
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_ends_the_run(fake, answer):
    model = Remote(opened(fake(v1__completions=[(200, answer)])))
    with pytest.raises(TrainingFailed, match=r"\[reward\.verdict\.vllm_server\] the server at"):
        list(model.given([[1, 2]], 1))


def test_a_classifier_of_two_labels_and_a_model_of_another_kind_are_refused(fake):
    two = {"data": [{"index": 0, "probs": [0.1, 0.9]}]}
    with pytest.raises(ConfigError, match=r"gives 2 labels to a sequence, expected one"):
        Remote(opened(fake(classify=[(200, two)]))).check(classifies=True)
    with pytest.raises(ConfigError, match=r"refuses /classify: status 404.*Expected with --runner pooling"):
        Remote(opened(fake(classify=[(404, {})]))).check(classifies=True)
    with pytest.raises(ConfigError, match=r"refuses /v1/completions: status 404.*Expected a language model"):
        Remote(opened(fake(v1__completions=[(404, {})]))).check(classifies=False)
    Remote(opened(fake())).check(classifies=True)
    Remote(opened(fake())).check(classifies=False)


def test_the_token_itself_is_told_besides_the_likeliest_ones_or_among_them():
    among = {"3": {"logprob": -2.0}, "5": {"logprob": -0.5}}
    besides = {"9": {"logprob": -9.0}, "3": {"logprob": -2.0}, "5": {"logprob": -0.5}}
    found = read_given([None, among, besides], [0, 3, 9], 2)
    assert found.log_probs.tolist() == [-2.0, -9.0]
    assert found.top_ids.tolist() == [[5, 3], [5, 3]]
    assert found.top_log_probs.tolist() == [[-0.5, -2.0]] * 2


@pytest.mark.parametrize("count", [1, 2, 97, 512, 513, 151_936])
def test_ids_that_are_compared_are_spread_to_the_last(count):
    ids = spread(count, 512)
    assert (ids[0], ids[-1]) == (0, count - 1)
    assert len(ids) <= 513
    assert max([b - a for a, b in itertools.pairwise(ids)], default=1) <= math.ceil(count / 512)


# -- a run ------------------------------------------------------------------


def test_a_run_takes_its_rewards_from_servers(fake, tmp_path):
    """Of the models' folders only config and tokenizer are read: they hold no weights."""
    server = fake()
    write_model(tmp_path / "actor", {}, 0, tied=True)
    for name in ("writes", "scores"):
        AutoConfig.for_model(**SHAPE, num_labels=1).save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    table = {"backend": "vllm_server", "vllm_server": {"url": server.url}}
    asks = {"prompt": "{completion}=?", "verdicts": {"1": 1.0, "0": 0.0}}
    settings = {
        "model.path": str(tmp_path / "actor"),
        "data.prompts_per_step": 2,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 4,
        "reward": [
            {"name": "read", "verdict": {"path": str(tmp_path / "writes"), **asks, **table}},
            {"name": "helpful", "model": {"path": str(tmp_path / "scores"), **table}},
        ],
        "run.dir": str(tmp_path / "runs"),
        "run.steps": 1,
        "tracking.trackers": [],
    }
    rows = [{"prompt": f"{i}+{i}="} for i in range(4)]
    trainer = Trainer(load_config(overrides=settings), data=rows)
    trainer.train()
    trainer.close()
    one, nought = TOKENIZER.convert_tokens_to_ids(["1", "0"])
    p = law(TOKENIZER.convert_tokens_to_ids("?"))[[one, nought]].exp()
    (file,) = trainer.folder.rollouts_dir.glob("*.parquet")
    for rollout in read_rollouts(file):
        ids = rollout.token_ids.tolist()
        ids += [] if ids[-1] == TOKENIZER.eos_token_id else [TOKENIZER.eos_token_id]
        assert rollout.rewards["helpful"] == pytest.approx(sum(ids) / 7)
        assert rollout.rewards["read"] == pytest.approx(float(p[0] / p.sum()), abs=1e-6)


def test_a_run_is_refused_before_its_models_are_built(fake, tmp_path):
    write_model(tmp_path / "actor", {}, 0, tied=True)
    table = {
        "path": str(tmp_path / "actor"),
        "backend": "vllm_server",
        "prompt": "{completion}",
        "verdicts": {"1": 1, "0": 0},
    }
    table["vllm_server"] = {"url": fake(release="0.9").url}
    settings = {"model.path": str(tmp_path / "actor"), "run.steps": 1}
    settings["reward"] = [{"name": "read", "verdict": table}]
    trainer = Trainer(load_config(overrides=settings), data=[{"prompt": "1+1="}] * 8)
    with pytest.raises(ConfigError, match=r"\[reward\.verdict\.vllm_server\] url: vLLM 0\.9 runs at"):
        trainer.setup(training=True)
    assert not trainer.runtime.engines
    trainer.close()
