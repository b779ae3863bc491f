"""Rows 32, 34, 35 and 40: servers that stall, clocks that jump, secrets, and folders of all kinds."""

import json
import os
import re
import shutil
import socketserver
import threading
import time

import pytest

pytestmark = pytest.mark.chaos

TRACKER = '''
import urllib.request
from engine_core import hookimpl
from engine_core.specs import Options, TrackerSpec
from engine_core.runs.tracking import Tracker


class PostOptions(Options):
    port: int


class Post(Tracker):
    """Posts each step to a local server."""

    def log(self, step, metrics):
        urllib.request.urlopen(f"http://127.0.0.1:{self.options.port}/{step}", data=b"{}").read()


@hookimpl
def engine_trackers():
    return {"post": TrackerSpec(load=Post, config=PostOptions)}
'''


class _Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.server.seen += 1
        if self.server.answers is None:
            self.server.end.wait(60)  # accepts, and says nothing
        else:
            self.rfile.readline()
            self.wfile.write(self.server.answers)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


@pytest.fixture
def local_server():
    """``local_server(b"HTTP/1.0 500 ...")``: answers every request so; None: never answers."""
    servers = []

    def start(answers):
        server = _Server(("127.0.0.1", 0), _Handler)
        server.answers, server.seen, server.end = answers, 0, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.end.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def tracked(engine, tiny, tiny_plugin):
    def run(port, steps=6):
        changes = {"tracking.trackers": ["post"], "tracking.post.port": port, "run.steps": steps}
        return engine("train", tiny(changes, plugin=tiny_plugin + TRACKER))

    return run


def test_a_tracker_whose_server_never_answers_delays_no_step_and_not_the_end(tracked, local_server, metrics):
    server = local_server(None)
    run = tracked(server.server_address[1])
    assert run.code == 0, run.err
    assert [line["step"] for line in metrics()] == [1, 2, 3, 4, 5, 6]
    assert (
        "Tracker 'post' has not finished in time and is left behind; metrics.jsonl has all steps" in run.err
    )
    assert server.seen == 1


def test_a_tracker_whose_server_fails_is_off(tracked, local_server, metrics):
    run = tracked(local_server(b"HTTP/1.0 500 Internal Server Error\r\n\r\n").server_address[1], steps=30)
    assert run.code == 0, run.err
    assert "Tracker 'post' failed and is off for the rest of the run; training continues" in run.err
    assert "HTTP Error 500" in run.err
    assert len(metrics()) == 30


def test_a_tracker_whose_server_is_not_there_is_off(tracked, local_server, metrics):
    server = local_server(b"")
    port = server.server_address[1]
    server.shutdown()
    server.server_close()
    run = tracked(port, steps=3)
    assert run.code == 0, run.err
    assert "Tracker 'post' failed" in run.err
    assert len(metrics()) == 3


# clocks

JUMPING_CLOCK = """
import time


@hookimpl
def engine_on_event(event, step):
    if event == "step_finished" and step == 3:
        real = time.time
        time.time = lambda: real() + 3600 * {hours}
"""


@pytest.mark.parametrize("hours", [1, -1, 24 * 365])
def test_a_clock_that_jumps_changes_no_duration_and_ends_no_worker(engine, tiny, tiny_plugin, metrics, hours):
    reward = '[[reward]]\nname = "bytes_share"\nworkers = 1\ntimeout_seconds = 60\n'
    changes = {"run.steps": 6, "checkpoint.every_minutes": 30, "checkpoint.every_steps": 0}
    run = engine(
        "train", tiny(changes, reward=reward, plugin=tiny_plugin + JUMPING_CLOCK.format(hours=hours))
    )
    assert run.code == 0, run.err
    stamps = [line["time"] for line in metrics()]
    assert abs(stamps[3] - stamps[2] - 3600 * hours) < 600  # it has really jumped
    assert all(0 <= line["time/step"] < 60 for line in metrics())
    assert all(line["reward/failures"] == line["reward/timeouts"] == 0 for line in metrics())
    assert run.err.count("Checkpoint: ") == 1  # every_minutes counts minutes that passed


def test_runs_that_start_in_one_second_or_after_a_clock_went_back_have_names_of_their_own(engine, tiny):
    path = tiny({"run.steps": 1})
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "run.name" not in line))
    frozen = "import time\nfixed = time.localtime(1_700_000_000)\nreal = time.strftime\ntime.strftime = lambda f, t=fixed: real(f, fixed)\n"
    names = set()
    for zone in ("UTC", "America/New_York", "Pacific/Kiritimati"):
        run = engine("train", path, prelude=frozen, env={"TZ": zone})
        assert run.code == 0, run.err
        names.add(run.out.strip())
    assert len(names) == 3
    assert engine("resume", "latest", "--steps", 2).code == 0


# secrets

CANARY = "canary-5f0c-value"


def files_with(text, folder):
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_a_secret_of_the_environment_or_the_config_is_in_no_file_and_in_no_message(engine, tiny, tiny_plugin):
    leaky = """
import logging
import os
from engine_core.specs import Options, Stage


class LeakyOptions(Options):
    api_key: str = ""


def leaky(rollouts, step, api_key):
    logging.getLogger("engine").info("the key is %s and %s", api_key, os.environ["MY_API_KEY"])
    if step == 3:
        raise RuntimeError(f"401 for https://x.example/?key={api_key}&token={os.environ['MY_API_KEY']}")
    return rollouts, {}


@hookimpl
def engine_stages():
    return {"leaky": Stage(load=leaky, config=LeakyOptions)}
"""
    stage = f'[[stage]]\nname = "leaky"\n[stage.leaky]\napi_key = "{CANARY}-in-toml"\n'
    reward = '[[reward]]\nname = "bytes_share"\nworkers = 1\n'
    run = engine(
        "train",
        tiny({"tracking.trackers": ["tensorboard"]}, reward=reward + stage, plugin=tiny_plugin + leaky),
        env={"MY_API_KEY": f"{CANARY}-in-env", "HF_TOKEN": f"{CANARY}-token"},
    )
    assert run.code != 0
    assert "401 for https://x.example/?key=[redacted]&token=[redacted]" in run.err
    assert files_with(CANARY, engine.folder / "runs") == []
    assert CANARY not in run.err + run.out


# folders

FOLDERS = ["with space", "ünïcode-火", "quo'te\"s", "percent%20#hash", "-dash"]


@pytest.mark.parametrize(
    "name", [pytest.param(f, marks=[] if f in FOLDERS[1:3] else pytest.mark.slow) for f in FOLDERS]
)
def test_any_folder_name_works_from_start_to_export(engine, tiny, tiny_world, name):
    folder = engine.folder / name
    shutil.copytree(tiny_world, folder)
    changes = {
        "model.path": str(folder / "model"),
        "data.train": str(folder / "data" / "train.jsonl"),
        "run.dir": str(folder / "the runs"),
        "run.steps": 2,
    }
    run = engine("train", tiny(changes, folder=folder), cwd=folder)
    assert run.code == 0, run.err
    path = folder / "the runs" / "r"
    assert run.out.strip() == str(path)
    assert engine("resume", path, "--steps", 3).code == 0
    for command in (["report", path], ["prune", path], ["export", path, folder / "out"]):
        done = engine(*command)
        assert done.code == 0, done.err
    assert (folder / "out" / "model.safetensors").exists()


def test_windows_line_ends_and_a_byte_order_mark_are_read(engine, tiny, tiny_world, tmp_path, metrics):
    data = tmp_path / "data.jsonl"
    data.write_bytes(
        b"\xef\xbb\xbf" + (tiny_world / "data" / "train.jsonl").read_bytes().replace(b"\n", b"\r\n")
    )
    path = tiny({"data.train": str(data), "run.steps": 2})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    run = engine("train", path)
    assert run.code == 0, run.err
    assert all(line["data/bad_rows"] == 0 for line in metrics())


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(engine, tiny, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for run_dir in ("file", "file/below", "/proc/runs", "/dev/null"):
        run = engine("train", tiny({"run.dir": run_dir}))
        assert run.code == 5, run.err
        assert f"run.dir: cannot make a run folder in '{run_dir}'" in run.err
        assert "random weights" not in run.err
        assert "Traceback" not in run.err


@pytest.fixture
def read_only(tmp_path):
    """A folder on which nothing can be written, also by root."""
    import subprocess

    folder = tmp_path / "sealed"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("root may write everywhere, and mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_read_only_folder_is_refused_at_the_start(engine, tiny, read_only):
    run = engine("train", tiny({"run.dir": str(read_only / "runs")}))
    assert run.code == 5, run.err
    assert "cannot make a run folder" in run.err
    assert re.search("Read-only file system|Permission denied", run.err)


def test_the_time_of_a_line_is_the_wall_clocks(engine, tiny, metrics):
    before = time.time()
    assert engine("train", tiny({"run.steps": 1})).code == 0
    assert before - 1 <= metrics()[0]["time"] <= time.time() + 1
    assert json.dumps(metrics())
