"""Clusters that are joined, and those that are refused with the keys to change."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from engine_core import load_config
from engine_core.errors import ConfigError
from engine_plugin_ray import cluster as module
from engine_plugin_ray import greeting, joining
from engine_plugin_ray.cluster import Cluster
from engine_plugin_ray.joining import check, minor
from engine_plugin_ray.keeper import MARK, clear


def refusal(address):
    with pytest.raises(ConfigError) as caught:
        Cluster(address).join()
    return str(caught.value)


@pytest.mark.parametrize("address", ["head", ":6379", "head:ray", "head:0", "head:65536", "head:²", "a b:1"])
def test_an_address_without_a_host_or_a_port_is_refused(no_cluster, address):
    assert f"runtime.ray.address is '{address}'; expected HOST:PORT" in refusal(address)


SCHEMES = [("ray://head:10001", "Ray Client's"), ("http://head:8265/x", "not a cluster's")]


@pytest.mark.parametrize(("address", "what"), SCHEMES)
def test_an_address_of_another_service_is_refused_with_the_heads(no_cluster, address, what):
    text = refusal(address)
    assert f"runtime.ray.address is '{address}'; an address that begins with" in text
    assert f"is {what}. Name the cluster's head itself: 'head:6379'" in text


@pytest.mark.parametrize("address", ["head", "ray://head:10001"])
def test_an_address_that_is_none_is_refused_by_the_key_when_the_file_is_read(settings, address):
    given = settings | {"runtime.backend": "ray", "runtime.ray.address": address}
    with pytest.raises(ConfigError, match=rf"runtime\.ray\.address: got '{address}': (expected|an address)"):
        load_config(given, allow_code=True)


def test_an_address_of_the_environment_is_named_as_that(no_cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert "runtime.ray.address = 'auto': RAY_ADDRESS is 'ray://head:10001'; " in refusal("auto")


def test_an_address_where_nobody_answers_is_refused(no_cluster):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"runtime.ray.address = '{address}': nothing answers there (" in refusal(address)


ANSWERS = [
    ({"ray": "2.1.0", "python": "3.11.2"}, "the cluster is of Ray 2.1.0 and Python 3.11.2, and this is Ray "),
    (
        {"error": "AuthenticationError: RPC error"},
        "the cluster asks for a token, and does not know ours (no token is",
    ),
    ({}, "what answers there is no Ray cluster. Expected the head of one, "),
    ({"ray": None, "python": None, "mode": "disabled"}, "what answers there is no Ray cluster. "),
]


@pytest.mark.parametrize(("answer", "text"), ANSWERS)
def test_a_cluster_that_does_not_fit_is_refused_before_it_is_joined(answer, text, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(ConfigError) as caught:
        check("runtime.ray.address = 'head:6379'", answer)
    assert str(caught.value).startswith("runtime.ray.address = 'head:6379': " + text)


def test_a_question_that_takes_too_long_is_told_from_an_answer_that_is_none(monkeypatch):
    monkeypatch.setattr(greeting, "SECONDS", 0.05)
    with pytest.raises(ConfigError, match=r"no Ray cluster \(it did not say so within 0\.05 s\)\. Expected"):
        check("runtime.ray.address = 'head:6379'", greeting.greet("127.0.0.1:1"))


DENIED = {"error": "AuthenticationError: RPC error"}
TOKENS = [
    ({"RAY_AUTH_TOKEN_PATH": "FILE"}, "(RAY_AUTH_TOKEN_PATH is set here). Set RAY_AUTH_TOKEN to the cluster's token, "),
    ({"RAY_AUTH_TOKEN_PATH": "NONE"}, "(RAY_AUTH_TOKEN_PATH is set here, to a file that is not there or empty). Set"),
    ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "ab"}, "(RAY_AUTH_MODE is 'disabled' here, so none is sent). Set"),
    ({"RAY_AUTH_MODE": "disabled"}, "the file that holds it, and RAY_AUTH_MODE to token."),
    ({"HOME": "FOLDER"}, "(that of ~/.ray/auth_token). Set"),
]  # fmt: skip


@pytest.mark.parametrize(("env", "text"), TOKENS)
def test_a_token_that_is_refused_is_named_by_where_it_comes_from(env, text, monkeypatch, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("ab")
    places = {
        "FILE": tmp_path / ".ray" / "auth_token",
        "NONE": tmp_path / "none",
        "FOLDER": tmp_path,
    }
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, str(places.get(value, value)))
    with pytest.raises(ConfigError) as caught:
        check("runtime.ray.address = 'head:6379'", DENIED)
    assert text in str(caught.value)


def test_another_patch_of_python_is_no_other_version():
    import ray

    theirs = {"ray": ray.__version__, "python": minor(sys.version.split()[0]) + ".99", "mode": "token"}
    assert check("runtime.ray.address = 'head:6379'", theirs) == "token"


def test_a_machine_that_is_no_node_is_refused_with_the_way_to_become_one(monkeypatch):
    from ray._private import services

    monkeypatch.setattr(joining, "NODE_SECONDS", 0.3)
    monkeypatch.setattr(services, "find_node_ids", set)
    with pytest.raises(ConfigError) as caught:
        joining.see_node("runtime.ray.address = 'head:6379'", "head:6379")
    assert str(caught.value) == (
        "runtime.ray.address = 'head:6379': this machine is no node of the cluster, and engine runs on one of them. Make "
        "it one with 'ray start --address=head:6379', or start engine on a node."
    )
    late = iter([set(), {"a node"}])
    monkeypatch.setattr(services, "find_node_ids", lambda: next(late))
    joining.see_node("runtime.ray.address = 'head:6379'", "head:6379")  # one that was just starting


# -- against a real cluster ----------------------------------------------------------------------

JOIN = """
import sys
import ray
from engine_core.errors import ConfigError
from engine_plugin_ray.cluster import Cluster, asks_for_token

def one():
    return 1

try:
    made = Cluster(sys.argv[1])
    made.join()
    print("joined", asks_for_token(), ray.get(ray.remote(one).remote(), timeout=60))
    made.close()
except ConfigError as error:
    print(error)
"""
OLDER = """
import json, sys
from ray._raylet import GcsClient
from engine_plugin_ray.greeting import KEY, NAMESPACE

client = GcsClient(address=sys.argv[1])
found = json.loads(client.internal_kv_get(KEY, NAMESPACE))
found |= json.loads(sys.argv[2])
client.internal_kv_put(KEY, json.dumps(found).encode(), True, NAMESPACE)
"""


def plain(home):
    """Return the environment of a process that belongs to no cluster."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("RAY_") and n != MARK}
    return kept | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}


def says(code, *words, home, **env):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, env=plain(home) | env, capture_output=True, text=True, timeout=120, check=False
    ).stdout


@pytest.fixture
def join(cluster, tmp_path):
    """Return a function that joins the session's cluster from another process, with a token or without."""
    import ray

    from engine_plugin_ray import cluster as module

    def run(**env):
        return says(JOIN, ray.get_runtime_context().gcs_address, home=tmp_path, **env)

    run.token = module._TOKEN
    return run


@pytest.mark.slow
def test_who_knows_the_token_joins_and_nobody_else(join):
    assert "joined True" in join(RAY_AUTH_TOKEN=join.token)
    assert "does not know ours (no token is set here)" in join()
    assert "does not know ours (RAY_AUTH_TOKEN is set here)" in join(RAY_AUTH_TOKEN="ab" * 32)


@pytest.fixture
def head(tmp_path):
    """Return a function that starts a cluster as a user does, and returns its address."""
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")

    def start(**env):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=2",
                "--include-dashboard=false", "--object-store-memory=100000000", f"--temp-dir={folder}/ray",
            ],
            env=plain(tmp_path) | {MARK: folder} | env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        node = re.search(r"Local node IP: (\S+)", done.stdout + done.stderr)
        return f"{node[1]}:{port}"

    yield start
    clear(folder)


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "cd" * 32}


@pytest.mark.slow
def test_the_cluster_of_this_machine_is_refused_as_one_by_its_address(head, tmp_path):
    """Ray itself reports no cluster where it lacks the token, and ends a process that must have one."""
    address = head(**TOKEN)
    at = f"runtime.ray.address = 'auto' ({address}): the cluster "
    auto = {"home": tmp_path, "RAY_ADDRESS": address}
    assert "joined True 1" in says(JOIN, "auto", **auto, **TOKEN)
    assert f"{at}asks for a token, and does not know ours (no token is set here)" in says(
        JOIN, "auto", **auto
    )
    no_token = says(JOIN, address, home=tmp_path, RAY_AUTH_MODE="token")
    assert "the cluster asks for a token, and does not know ours (no token is set here)" in no_token
    says(OLDER, address, json.dumps({"ray_version": "2.1.0"}), home=tmp_path, **TOKEN)
    assert f"{at}is of Ray 2.1.0 and Python " in says(JOIN, "auto", **auto, **TOKEN)
    older = json.dumps({"ray_version": ray_version(), "python_version": "3.9.1"})
    says(OLDER, address, older, home=tmp_path, **TOKEN)
    assert f"the cluster is of Ray {ray_version()} and Python 3.9.1, and this is Ray " in says(
        JOIN, address, home=tmp_path, **TOKEN
    )


@pytest.mark.slow
def test_who_has_a_token_joins_a_cluster_that_asks_for_none_unless_a_token_must_be_asked_for(head, tmp_path):
    """Ray itself joins with the token, and then ends every worker."""
    address = head(RAY_AUTH_MODE="disabled")
    assert "joined False 1" in says(JOIN, address, home=tmp_path, RAY_AUTH_TOKEN="cd" * 32)
    assert "RAY_AUTH_MODE is 'token' here, and the cluster asks for no token. " in says(
        JOIN, address, home=tmp_path, **TOKEN
    )


def ray_version():
    import ray

    return ray.__version__


@pytest.mark.slow
def test_a_cluster_of_the_runs_own_is_closed_to_others(cluster):
    ours = [p for p in psutil.process_iter() if marked(p, cluster.folder)]
    assert {"raylet", "gcs_server"} <= {p.name() for p in ours}
    listening = [
        c.laddr.ip for p in ours for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert listening
    assert stat.S_IMODE(os.stat(cluster.folder).st_mode) == 0o700


def marked(process, folder):
    try:
        return process.environ().get(MARK) == folder
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("characters", "private"), [(10, True), (19, True), (20, False), (29, False), (60, False)]
)
def test_a_temporary_folder_in_which_sockets_would_have_too_long_names_is_not_used(
    monkeypatch, characters, private
):
    name = "/" + "t" * (characters - 1)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: name)
    assert module._short_folder() == (None if private else "/tmp")
    longest = len(f"{name if private else '/tmp'}{module.SOCKET}")
    assert longest <= module.SOCKET_BYTES


@pytest.mark.slow
def test_a_cluster_starts_wherever_the_temporary_folder_is(tmp_path_factory):
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="a" * 11))  # 24 characters
    try:
        text = (
            "from engine_plugin_ray.cluster import Cluster\nc = Cluster('')\n"
            "c.start(cpus=1, gpus=0, object_store_mib=100, workers=1)\nc.close()\nprint('started')"
        )
        done = subprocess.run(
            [sys.executable, "-c", text],
            env=os.environ | {"TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "started" in done.stdout, done.stderr
        assert not list(folder.glob("engine-ray-*"))
    finally:
        shutil.rmtree(folder)
