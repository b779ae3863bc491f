"""``engine serve`` and ``engine chat``: the weights that answer, conversations, and what users get wrong."""

import io
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from openai import APIError, APIStatusError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_core import sampling
from engine_core.cli.main import main
from engine_core.errors import ConfigError, TrainingFailed
from engine_plugin_agents import serve_command
from engine_plugin_agents.server import bound
from engine_plugin_agents.serving import Service, read_target

DOCS = Path(__file__).parents[2] / "docs"
SHORT = ["rollout.max_response_tokens=12"]
HEAD = "<|turn|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the pages' tiny chat model, and a run of two steps, whose second step was evaluated as worse."""
    folder = tmp_path_factory.mktemp("serve")
    page = (DOCS / "first_run.md").read_text("utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, program in enumerate(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[:2]):
            (folder / f"make_{number}.py").write_text(program)
            runpy.run_path(str(folder / f"make_{number}.py"))
        text = re.search(r"^```toml tiny/run.toml\n(.*?)^```", page, re.M | re.S)[1]
        (folder / "tiny" / "run.toml").write_text(text)
        words = ["run.name=two", "trainer=sft", "model.path=tiny/chat", "data.chat_template=true"]
        words += ["data.columns.response=answer", "data.system='Add.'", "actor.optim.lr=0.1"]
        words += ["checkpoint.every_steps=1", "checkpoint.best_metric=data/epoch", "checkpoint.best_mode=min"]
        assert main(["train", "tiny/run.toml", *(word for each in words for word in ("--set", each))]) == 0
        for step in (1, 2):
            assert main(["export", "two", f"step_{step}", "--step", str(step)]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def greedy(model, prompt):
    """What transformers says after a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        made = AutoModelForCausalLM.from_pretrained(model).generate(**ids, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=False)


def client_of(service):
    return OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)


def ask(client, *messages, **options):
    return client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, **options)


USER = {"role": "user", "content": "1 + 2 = "}


@pytest.mark.parametrize(
    ("target", "step", "model", "other"),
    [
        ("two", None, "step_2", "step_1"),
        ("two", "1", "step_1", "step_2"),
        ("two", "best", "step_1", "step_2"),
        ("step_1", None, "step_1", "step_2"),
    ],
)
def test_the_weights_of_the_target_answer(target, step, model, other):
    prompt = f"<|turn|>user\n1 + 2 = <eos>{HEAD}"
    expected = greedy(model, prompt)
    assert expected != greedy(other, prompt)
    with closing(Service(*read_target(target, step, SHORT))) as service:
        answer = ask(client_of(service), USER, temperature=0)
    assert answer.choices[0].message.content == expected.removesuffix("<eos>")


def test_the_end_tokens_of_the_generation_config_end_a_turn(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained("step_1")
    with closing(Service(*read_target("step_1", None, SHORT))) as service:
        whole = ask(client_of(service), USER, temperature=0).choices[0].message.content
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    shutil.copytree("step_1", tmp_path / "ends")
    (tmp_path / "ends" / "generation_config.json").write_text(f'{{"eos_token_id": [1, {ids[2]}]}}')
    with closing(Service(*read_target(str(tmp_path / "ends"), None, SHORT))) as service:
        answer = ask(client_of(service), USER, temperature=0)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (
        ids.index(ids[2]) + 1,
        "stop",
    )


def test_a_conversation_continues_the_sampled_tokens_and_many_are_answered_at_once():
    tokenizer = AutoTokenizer.from_pretrained("tiny/chat")
    with closing(Service(*read_target("tiny/chat", None, SHORT))) as service:
        client = client_of(service)
        encoded_again = 0
        for _ in range(4):
            first = ask(client, USER)
            said = first.choices[0].message.model_dump()
            second = ask(client, USER, said, USER)
            follows = f"<eos><|turn|>user\n1 + 2 = <eos>{HEAD}"
            if first.choices[0].finish_reason == "stop":
                follows = follows.removeprefix("<eos>")
            new = len(tokenizer(follows, add_special_tokens=False)["input_ids"])
            assert second.usage.prompt_tokens == first.usage.total_tokens + new
            encoded_again += len(tokenizer(said["content"])["input_ids"]) != first.usage.completion_tokens
        assert encoded_again  # text encoded again would have had another length
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda _: ask(client, USER), range(32)))
        assert len({answer.id for answer in answers}) == 32
        assert len({answer.choices[0].message.content for answer in answers}) > 16


def asked_until_an_error(client):
    while True:
        ask(client, USER)


def test_a_server_ends_at_ctrl_c_also_with_a_request_in_flight():
    command = [sys.executable, "-m", "engine_core.cli.main", "serve", "tiny/chat", "--port", "0"]
    command += ["--set", "rollout.max_response_tokens=100000"]
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start background commands  # noqa: E731
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=ignored
    )
    try:
        url, key = (process.stdout.readline().strip().partition("=")[2] for _ in range(2))
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url), process.communicate()
        client = OpenAI(base_url=url, api_key=key, max_retries=0)
        assert ask(client, USER, max_tokens=3).usage.completion_tokens <= 3
        with pytest.raises(APIStatusError, match="The API key is not"):
            ask(OpenAI(base_url=url, api_key="sk-0-wrong", max_retries=0), USER)
        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(asked_until_an_error, client) for _ in range(4)]
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            assert all(isinstance(each.exception(timeout=60), APIError) for each in found)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "stopped\n"), err
        assert "Traceback" not in err
    finally:
        process.kill()


def chat(monkeypatch, capsys, lines, *words):
    """The lines that ``engine chat`` prints for these lines of stdin."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    capsys.readouterr()
    assert main(["chat", *words, *(word for each in SHORT for word in ("--set", each))]) == 0
    return capsys.readouterr().out


def test_a_chat_has_several_turns_and_can_begin_again(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        serve_command, "answer", lambda url, key, messages: asked.append(messages) or ["a", "b"]
    )
    assert chat(monkeypatch, capsys, ["x", "", "y", "/reset", "z", "/exit", "w"], "two") == "ab\n" * 3
    begin, reply = {"role": "system", "content": "Add."}, {"role": "assistant", "content": "ab"}
    x, y, z = ({"role": "user", "content": word} for word in "xyz")
    assert asked == [[begin, x], [begin, x, reply, y], [begin, z]]


def test_a_chat_with_a_server_prints_its_answers(monkeypatch, capsys):
    with closing(Service(*read_target("step_1", None, SHORT))) as service:
        monkeypatch.setenv("MY_KEY", service.key)
        monkeypatch.setattr("sys.stdin", io.StringIO("1 + 2 = \n"))
        assert main(["chat", f"{service.url}/v1", "--key-env", "MY_KEY"]) == 0
        assert len(capsys.readouterr().out) > 1
        monkeypatch.setenv("MY_KEY", "wrong")
        monkeypatch.setattr("sys.stdin", io.StringIO("1 + 2 = \n"))
        assert main(["chat", f"{service.url}/v1", "--key-env", "MY_KEY"]) == 2
        assert "refuses the request (401): The API key is not that" in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", io.StringIO("1 + 2 = \n"))
        assert main(["chat", service.url]) == 2
        assert "/chat/completions is not served" in capsys.readouterr().err


class _Scripted(BaseHTTPRequestHandler):
    """A server that answers with what its class says, and keeps the headers of requests."""

    status, body, location, asked = 200, b"", "", []

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.headers)
        self.send_response(self.status)
        if self.location:
            self.send_header("Location", self.location)
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_POST

    def log_message(self, *_):
        """Print nothing."""


@contextmanager
def scripted_server(body, status=200, location=""):
    """scripted_server(...): the URL of a server with these answers, and the headers of its requests."""
    kind = type("Handler", (_Scripted,), {"body": body, "status": status, "location": location, "asked": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", kind.asked
        server.shutdown()
        thread.join()


PART = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


def test_a_chat_reads_streams_with_comments_and_other_fields():
    usage = b'data: {"choices": [], "usage": {"total_tokens": 3}}\n\ndata:[DONE]\n\n'
    with scripted_server(b": keep-alive\n\nevent: part\n" + PART + PART + usage) as (url, _):
        assert "".join(serve_command.answer(url, "key", [USER])) == "aa"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (PART + b'data: {"error": {"message": "too long"}}\n\n', "ends its answer with an error: .*too long"),
        (b"<html>Hi</html>", "no answer .it sent no events.. Expected the URL of a server, with /v1"),
    ],
)
def test_a_chat_names_an_error_in_a_stream_and_an_answer_that_is_no_stream(body, message):
    with scripted_server(body) as (url, _), pytest.raises(ConfigError, match=message):
        [*serve_command.answer(url, "key", [USER])]


def test_a_chat_sends_its_key_to_no_other_server():
    refused = pytest.raises(ConfigError, match="answers 302 Found")
    with scripted_server(PART) as (other, asked), scripted_server(b"", 302, other) as (url, first), refused:
        [*serve_command.answer(url, "key", [USER])]
    assert (len(first), asked) == (1, [])


def test_a_sampler_that_fails_ends_the_chat_with_its_error(monkeypatch, capsys):
    def broken(engine):
        raise TrainingFailed("the sampler is broken")

    monkeypatch.setattr(sampling, "_stepped", broken)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert main(["chat", "two"]) == TrainingFailed.exit_code
    assert "engine: the sampler is broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "tow"], "No run at 'tow'"),
        (["serve", "tow"], "Did you mean 'two'?"),
        (["serve", "two", "--step", "7"], "--step 7: two has no checkpoint of that step. It has: 1, 2."),
        (["serve", "two", "--step", "last"], "--step: got 'last', expected the number of a step or 'best'."),
        (
            ["serve", "two", "--set", "checkpoint.best_metric=loss", "--step", "best"],
            "no checkpoint of two has a value",
        ),
        (["serve", "tiny/chat", "--step", "1"], "'tiny/chat' is no run, and only a run has checkpoints."),
        (["serve", "two", "--set", "rollout.bakend=hf"], "rollout.bakend: unknown key."),
        (["serve", "two", "--port", "{port}"], "Address already in use"),
        (
            ["chat", "http://127.0.0.1:{port}", "--step", "1"],
            "--step and --set are options of 'engine serve'",
        ),
        (["chat", "http://127.0.0.1:{free}/v1"], "no answer ([Errno 111] Connection refused)"),
    ],
)
def test_user_errors_exit_with_2(monkeypatch, capsys, words, message):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    with bound() as taken, bound() as closed:
        port, free = taken.getsockname()[1], closed.getsockname()[1]
        closed.close()
        assert main([word.format(port=port, free=free) for word in words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_checkpoint_and_a_tokenizer_without_a_template_are_refused(folder, capsys):
    shutil.copytree(
        folder / "runs" / "two", folder / "runs" / "empty", ignore=shutil.ignore_patterns("step_*")
    )
    assert main(["serve", "empty"]) == 2
    assert "No usable checkpoint in" in capsys.readouterr().err
    assert main(["serve", "tiny/model", "--port", "0"]) == 4
    assert "The tokenizer has no chat template" in capsys.readouterr().err
