"""Reward workers that are killed while they start, hostile responses, programs and servers, and what a reward leaves, in whole runs."""

import http.client
import itertools
import json
import signal
import socket
import threading
import urllib.parse

import pytest

from engine_core.runs.rollout_files import read_rollouts

pytestmark = pytest.mark.chaos

STARTS = """
import os
from pathlib import Path
from engine_core import hookimpl
from engine_core.specs import Reward


def make():
    for attempt in range(KILLS):
        if not (file := Path(f"start_{attempt}")).exists():
            file.touch()
            os.kill(os.getpid(), 9)
    return lambda completion: float(len(completion) % 3)


@hookimpl
def engine_rewards():
    return {"starts": Reward(load=make, factory=True)}
"""


def test_a_worker_that_is_killed_while_it_starts_is_started_again_and_the_third_time_ends_the_run(
    engine, tiny, metrics
):
    reward = '[[reward]]\nname = "starts"\nworkers = 1\n'
    refused = engine("train", tiny({"run.steps": 2}, reward=reward, plugin=STARTS.replace("KILLS", "3")))
    assert refused.code == 3, refused.err
    assert refused.err.count("was killed by SIGKILL (by a user, or for lack of memory) while it started") == 2
    assert "engine: Reward 'starts' does not start: its worker was killed by SIGKILL" in refused.err
    assert "Traceback" not in refused.err
    (engine.folder / "start_0").unlink()
    run = engine("train", engine.folder / "run.toml")  # the same name: nothing was trained
    assert run.code == 0, run.err
    assert run.err.count("while it started. Started again.") == 1
    assert [line["reward/starts/restarts"] for line in metrics()] == [1, 0]


HOSTILE_POLICY = """
import json
from pathlib import Path
from engine_core import hookimpl
from engine_core.specs import RolloutBackend
from engine_plugin_hf_rollout.engine import HFRolloutEngine
from engine_plugin_hf_rollout.plugin import HFOptions

TEXTS = json.loads((Path(__file__).parent / "texts.json").read_text())


class Hostile(HFRolloutEngine):
    def step(self):
        done = super().step()
        for rollout in done:
            rollout.text = TEXTS[(2 * rollout.group_id + int(rollout.request_id.rpartition(":")[2])) % len(TEXTS)]
        return done


@hookimpl
def engine_rollout_engines():
    return {"hostile": RolloutBackend(load=Hostile, config=HFOptions)}
"""


@pytest.fixture
def policy(engine, tiny):
    """``policy(texts, reward, rows)``: the run file of a policy that gives these responses, in turn."""

    def write(texts, reward, row, **changes):
        (engine.folder / "texts.json").write_text(json.dumps(texts))
        rows = [json.dumps({"prompt": f"{i}+{i}=", **row}) + "\n" for i in range(8)]
        (engine.folder / "rows.jsonl").write_text("".join(rows))
        settings = {"rollout.backend": "hostile", "data.train": str(engine.folder / "rows.jsonl")}
        settings |= {"data.validation": [], "run.steps": 1} | changes
        return tiny(settings, reward=reward, plugin=HOSTILE_POLICY)

    return write


def scores(engine, name, step=1):
    rollouts = read_rollouts(engine.folder / f"runs/r/rollouts/step_{step:06d}.parquet")
    return {rollout.text: (rollout.rewards[name], rollout.valid) for rollout in rollouts}


ANSWERS = ["\\boxed{9^{9^{9^{9}}}}", "9" * 1_000_000, "\\boxed{" + "(" * 10_000 + "1" + ")" * 10_000 + "}"]


@pytest.mark.slow
def test_hostile_answers_cost_their_samples_at_most_and_no_other_sample(engine, policy, metrics):
    both = '[[reward]]\nname = "math"\nworkers = 1\ntimeout_seconds = 0.5\nmax_failure_share = 1.0\non_timeout = "drop"\n'
    both += '[[reward]]\nname = "numeric"\nworkers = 0\n'
    run = engine(
        "train", policy([*ANSWERS, "so \\boxed{2}"], both, {"answer": "2"}, **{"data.prompts_per_step": 2})
    )
    assert run.code == 0, run.err
    assert "Traceback" not in run.err
    (line,) = metrics()
    found = scores(engine, "math")
    assert line["reward/math/timeouts"] == sum(not valid for _, valid in found.values()) > 0
    assert found["so \\boxed{2}"] == (1.0, True)
    numbers = scores(engine, "numeric")
    assert [numbers[text][0] for text in (*ANSWERS, "so \\boxed{2}")] == [0.0, 0.0, 0.0, 1.0]


CODE = '[[reward]]\nname = "code"\n[reward.code]\nmin_isolation = "{}"\nblock = "whole"\ntest_timeout_seconds = 1.0\n'
PROGRAMS = [
    "while True: pass",
    "import os\nos.kill(os.getppid(), 9)\nprint(2)",
    "open({!r}, 'w').write('escaped')\nprint(2)",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(600)\nprint(3)",
    "print(2)",
]
TESTS = json.dumps({"inputs": [""], "outputs": ["2"]})


def test_programs_that_attack_the_machine_do_nothing_to_it_and_the_next_one_is_scored(engine, policy):
    bait = engine.folder / "bait"
    texts = [program.format(str(bait)) for program in PROGRAMS]
    run = engine("train", policy(texts, CODE.format("limits"), {"tests": TESTS}))
    if "min_isolation" in run.err:
        pytest.skip("no sandbox on this machine")
    assert run.code == 0, run.err  # and no process is left, which the launcher checks
    assert not bait.exists()
    found = scores(engine, "code")
    assert (found["print(2)"], found["while True: pass"]) == ((1.0, True), (0.0, True))
    assert [found[text][0] for text in texts] == [0.0, 0.0, 0.0, 0.0, 1.0]


NO_SANDBOX = """
from engine_plugin_rewards.sandbox.box import Box, BoxProblem

start = Box._start

def limits_alone(box):
    if box.tier != "limits":
        raise BoxProblem("not on this machine")
    start(box)

Box._start = limits_alone
"""


def test_a_machine_below_min_isolation_and_rows_without_tests_are_refused_before_training(engine, policy):
    path = policy(PROGRAMS, CODE.format("landlock"), {"tests": TESTS})
    weak = engine("train", path, prelude=NO_SANDBOX)
    assert weak.code == 5, weak.err
    assert "min_isolation = 'landlock'" in weak.err
    path = policy(PROGRAMS, CODE.format("limits"), {})
    without = engine("train", path)
    assert without.code == 4, without.err
    assert "rows.jsonl:1: reward 'code' finds no tests" in without.err
    path = policy(PROGRAMS, CODE.format("limits"), {"tests": "5"})
    passed_by_all = engine("train", path)
    assert passed_by_all.code == 4, passed_by_all.err
    assert "rows.jsonl:1: reward 'code' cannot use the tests in column 'tests'" in passed_by_all.err
    assert not list(engine.folder.glob("runs/r/checkpoints/step_*"))


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def serving():
    """``serving(answers)``: address and connections of a server that answers each request by the next function, in turn."""
    opened = []

    def serve(answers):
        listener, turns, seen = socket.create_server(("127.0.0.1", 0)), itertools.cycle(answers), []
        opened.append(listener)

        def answer(connection, write):
            with connection:
                try:
                    head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                    while len(body) < length:
                        body += connection.recv(65536)
                    seen.append(body)
                    write(connection)
                except OSError:  # the engine has closed it
                    pass

        def accept():
            for write in turns:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection, write), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/", seen

    yield serve
    for listener in opened:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_server_that_drips_floods_redirects_or_sends_no_scores_costs_the_samples_of_its_request(
    engine, tiny, metrics, serving
):
    other, others = serving([lambda connection: None])
    ended = threading.Event()

    def drip(connection):
        connection.sendall(HEAD + b"Content-Length: 9000\r\n\r\n")
        while not ended.wait(0.01):
            connection.sendall(b" ")

    def flood(connection):
        connection.sendall(HEAD + b"Content-Length: 99999999999\r\n\r\n")
        while not ended.is_set():
            connection.sendall(b" " * 100_000)

    def redirect(connection):
        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode())

    def says(body):
        text = json.dumps(body).encode()
        return lambda connection: connection.sendall(
            HEAD + f"Content-Length: {len(text)}\r\n\r\n".encode() + text
        )

    each = [drip, flood, redirect, says({"verdict": "good"}), says({"scores": [1.0, 0.0]})]
    url, _ = serving([answer for answer in each for _ in range(4)])  # a step has four requests of two samples
    settings = f'url = "{url}"\nattempt_timeout_seconds = 3\nretries = 0\nmax_response_kb = 64\n'
    reward = f'[[reward]]\nname = "http"\nmax_failure_share = 1.0\n[reward.http]\n{settings}'
    run = engine("train", tiny({"run.steps": 5, "eval.at_end": False}, reward=reward))
    ended.set()
    assert run.code == 0, run.err
    assert [line["reward/failures"] for line in metrics()] == [8, 8, 8, 8, 0]
    assert metrics()[0]["reward/http/timeouts"] + metrics()[0]["reward/http/errors"] == 8
    assert metrics()[4]["reward/mean"] == 0.5
    for said in ("no whole answer within 3 s", "longer than 64 KB (max_response_kb)", "status 302"):
        assert said in run.err
    assert others == []


def ask(port, body=b"{}", token=None, length=None):
    """Return the status that ``engine serve-reward`` answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json", "Content-Length": length or len(body)}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("POST", "/score", body, headers)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


IMPATIENT = """
from engine_plugin_rewards.server.server import RewardServer

start = RewardServer.__init__
RewardServer.__init__ = lambda server, *given: start(server, *given, idle_seconds=0.3)
"""


def test_a_served_reward_refuses_strangers_huge_bodies_and_slow_clients_and_scores_the_others(engine, tiny):
    token, path = "0123456789abcdef", tiny()
    public = engine("serve-reward", path, "--host", "0.0.0.0", "--port", 0)
    assert public.code == 2, public.err
    assert "--token-env" in public.err
    words = ["serve-reward", path, "--port", 0, "--token-env", "SERVED_TOKEN"]
    server = engine.start(*words, env={"SERVED_TOKEN": token}, prelude=IMPATIENT)
    server.until(lambda: server.out.endswith("\n"), "its address")
    port = urllib.parse.urlsplit(server.out.strip()).port
    assert [ask(port)[0], ask(port, token="f" * 16)[0]] == [401, 401]
    assert ask(port, b"", token, length=10**12)[0] == 413
    with socket.create_connection(("127.0.0.1", port), 60) as slow:
        slow.sendall(b"POST /score HT")
        assert b" 200 " not in slow.recv(65536)  # the end of the connection, maybe with a reason
    samples = {"prompts": ["Q"], "completions": ["abc"], "columns": {}}
    assert ask(port, json.dumps(samples).encode(), token) == (200, b'{"scores": [1.0], "errors": {}}')
    server.send(signal.SIGTERM)
    assert server.wait().code == 0, server.err
    assert server.orphans() == []
    assert token not in server.err + server.out


DAEMON = """
import subprocess
from engine_core import hookimpl
from engine_core.specs import Reward


def leaves(completion):
    process = subprocess.Popen(["setsid", "--fork", "sleep", "600"])
    process.wait()
    return float(len(completion) % 3)


@hookimpl
def engine_rewards():
    return {"leaves": Reward(load=leaves)}
"""


@pytest.mark.parametrize(
    "fault", [None, pytest.param("step.train@2:raise", marks=pytest.mark.slow), "step.train@2:term"]
)
def test_daemons_that_a_reward_starts_end_with_the_run(engine, tiny, fault):
    reward = '[[reward]]\nname = "leaves"\nworkers = 1\n'
    env = {"ENGINE_FAULT": fault} if fault else None
    run = engine.start("train", tiny({"run.steps": 2}, reward=reward, plugin=DAEMON), env=env).wait()
    assert run.code == {None: 0, "step.train@2:raise": 1, "step.train@2:term": 75}[fault], run.err
    assert run.orphans() == []
