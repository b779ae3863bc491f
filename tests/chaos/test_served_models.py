"""A reward model behind ``vllm_server``, in whole runs: a fake of vLLM's server on loopback that does not fit, or stops answering."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer, LlamaConfig

pytestmark = pytest.mark.chaos


class Fake(BaseHTTPRequestHandler):
    """Answers as vLLM does, unless ``server.says`` has a status and a body for the path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked):
        status, body = 200, {}
        match self.path:
            case "/version":
                body = {"version": "0.32.0"}
            case "/v1/models":
                body = {"data": [{"id": "tiny", "max_model_len": 128}]}
            case "/detokenize":
                body = {"prompt": self.server.tokenizer.decode(asked["tokens"])}
            case "/classify":
                body = {
                    "data": [{"index": i, "probs": [sum(ids) / 7]} for i, ids in enumerate(asked["input"])]
                }
                self.server.scored += 1
        status, body = self.server.says.get(self.path, (status, body))
        if self.path == "/v1/models" and self.headers["Authorization"] != "Bearer right-token":
            status, body = 401, {"error": "Unauthorized"}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def models(tiny_world):
    found = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    found.says, found.scored = {}, 0
    found.tokenizer = AutoTokenizer.from_pretrained(tiny_world / "model")
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def served(models, tiny, tiny_world, tmp_path):
    """Writes the run file of a reward model that the server serves."""

    def write():
        config = LlamaConfig.from_pretrained(tiny_world / "model", num_labels=1)
        config.architectures = ["LlamaForSequenceClassification"]
        config.save_pretrained(tmp_path / "scores")
        models.tokenizer.save_pretrained(tmp_path / "scores")
        table = f'url = "http://127.0.0.1:{models.server_port}"\ntoken_env = "SERVED_TOKEN"\n'
        table += "retries = 1\nbackoff_seconds = 0.01\n"
        reward = '[[reward]]\nname = "helpful"\n[reward.model]\npath = "scores"\nbackend = "vllm_server"\n'
        return tiny({"run.steps": 3}, reward=f"{reward}[reward.model.vllm_server]\n{table}")

    return write


RIGHT = {"SERVED_TOKEN": "right-token"}
MISFITS = [
    ({"/version": (404, {})}, RIGHT, 2, "is no vLLM server: it has no /version (status 404)"),
    ({"/version": (503, {})}, RIGHT, 5, "does not answer /version: status 503"),
    ({"/version": (200, {"version": "0.24.0"})}, RIGHT, 2, "vLLM 0.24.0 runs at http"),
    ({"/v1/models": (200, {"data": []})}, RIGHT, 2, "model: 0 models are served at"),
    ({"/detokenize": (200, {"prompt": "zzz"})}, RIGHT, 2, "has other tokens than"),
    ({}, {"SERVED_TOKEN": "wr0ng-t0ken"}, 2, "refuses the token of $SERVED_TOKEN"),
]


def test_a_server_that_does_not_fit_is_refused_with_its_key_before_training(engine, served, models):
    path = served()
    for says, env, code, said in MISFITS:
        models.says = says
        run = engine("train", path, env=env)
        assert run.code == code, (said, run.err)
        assert "[reward.model.vllm_server]" in run.err
        assert said in run.err
        assert "Traceback" not in run.err
        assert "wr0ng-t0ken" not in run.err
    assert models.scored == 0
    assert not list(engine.folder.glob("runs/r/checkpoints/step_*"))


STOPS = """
import os
from engine_core import hookimpl


@hookimpl
def engine_on_event(event, step):
    if event == "step_finished" and step == 1:
        open("stepped", "w").close()
        while not os.path.exists("continue"):
            pass
"""


@pytest.mark.parametrize(
    ("says", "said"),
    [
        pytest.param((503, {"error": "overloaded"}), "does not answer: status 503", marks=pytest.mark.slow),
        ((200, {"data": []}), "[reward.model.vllm_server] the server at"),
    ],
    ids=["stops", "wrong"],
)
def test_a_server_that_stops_or_answers_wrongly_ends_the_run_and_a_resume_loses_nothing(
    engine, served, models, metrics, says, said
):
    path = served()
    (engine.folder / "tiny.py").write_text(STOPS)
    run = engine.start("train", path, env=RIGHT)
    run.until((engine.folder / "stepped").exists, "a step")
    models.says = {"/classify": says}
    (engine.folder / "continue").touch()
    run.wait()
    assert run.orphans() == []
    assert run.code == 6, run.err
    assert said in run.err
    assert "Traceback" not in run.err
    assert "The newest checkpoint is of step 1. Resume: engine resume" in run.err
    models.says = {}
    resumed = engine("resume", "r", env=RIGHT)
    assert resumed.code == 0, resumed.err
    assert [line["step"] for line in metrics()] == [1, 2, 3]
