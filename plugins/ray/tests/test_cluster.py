"""Clusters that are joined, and those that are refused with the keys to change."""

import contextlib
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
from engine_plugin_ray.address import host_and_port
from engine_plugin_ray.cluster import Cluster


def refusal(address):
    with pytest.raises(ConfigError) as caught:
        Cluster(address).join()
    return str(caught.value)


ADDRESSES = ["head", ":6379", "head:ray", "head:0", "head:65536", "head:²", "a b:1", "ray://head:10001"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none_is_refused_by_the_key_when_the_file_is_read(settings, address):
    given = settings | {"runtime.backend": "ray", "runtime.ray.address": address}
    with pytest.raises(
        ConfigError, match=rf"runtime\.ray\.address: got '{address}': expected HOST:PORT of a Ray"
    ):
        load_config(given, allow_code=True)


@pytest.mark.parametrize(("port", "what"), [(8265, "the dashboard"), (10001, "Ray Client")])
def test_a_port_of_another_service_is_named(port, what):
    with pytest.raises(ValueError, match=rf"{port} is the port of {what}; expected HOST:PORT of a Ray"):
        host_and_port(f"head:{port}")


def test_an_address_where_nobody_answers_is_refused(no_cluster):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"runtime.ray.address = '{address}': nothing answers there (" in refusal(address)


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

KEY, NAMESPACE = b"CLUSTER_METADATA", b"cluster"
client = GcsClient(address=sys.argv[1])
found = json.loads(client.internal_kv_get(KEY, NAMESPACE))
found |= json.loads(sys.argv[2])
client.internal_kv_put(KEY, json.dumps(found).encode(), True, NAMESPACE)
"""


def plain(home):
    """Return the environment of a process that belongs to no cluster."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")}
    return kept | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}


def says(code, *words, home, **env):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, env=plain(home) | env, capture_output=True, text=True, timeout=120, check=False
    ).stdout


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
            env=plain(tmp_path) | {"TEST_FOLDER": folder} | env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        node = re.search(r"Local node IP: (\S+)", done.stdout + done.stderr)
        return f"{node[1]}:{port}"

    yield start
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TEST_FOLDER") == folder:
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "cd" * 32}


@pytest.mark.slow
def test_a_cluster_is_joined_with_its_token_and_its_versions_alone(head, tmp_path):
    address = head(**TOKEN)
    auto = {"home": tmp_path, "RAY_ADDRESS": address}
    assert "joined True 1" in says(JOIN, "auto", **auto, **TOKEN)
    at = f"runtime.ray.address = '{address}': the cluster cannot be joined: "
    no_token = says(JOIN, address, home=tmp_path, RAY_AUTH_MODE="token")
    assert f"{at}AuthenticationError: Token authentication is enabled but no authentication token" in no_token
    wrong = says(JOIN, address, home=tmp_path, **TOKEN | {"RAY_AUTH_TOKEN": "ab" * 32})
    assert at in wrong
    assert "If the cluster asks for a token, set RAY_AUTH_MODE to 'token' and RAY_AUTH_TOKEN, or " in wrong
    says(OLDER, address, json.dumps({"ray_version": "2.1.0"}), home=tmp_path, **TOKEN)
    older = says(JOIN, address, home=tmp_path, **TOKEN)
    assert at in older
    assert "ersion" in older


@pytest.mark.slow
def test_a_cluster_that_asks_for_no_token_is_joined(head, tmp_path):
    address = head(RAY_AUTH_MODE="disabled")
    assert "joined False 1" in says(JOIN, address, home=tmp_path)


@pytest.mark.slow
def test_a_cluster_of_the_runs_own_is_closed_to_others(cluster):
    ours = [p for p in psutil.process_iter() if cluster.folder in " ".join(words(p))]
    assert {"raylet", "gcs_server"} <= {p.name() for p in ours}
    listening = [
        c.laddr.ip for p in ours for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert listening
    assert stat.S_IMODE(os.stat(cluster.folder).st_mode) == 0o700


def words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("characters", "private"), [(10, True), (15, True), (16, False), (29, False), (60, False)]
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
            "c.start(cpus=1, gpus=0)\nc.close()\nprint('started')"
        )
        done = subprocess.run(
            [sys.executable, "-c", text],
            env=os.environ | {"TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "started" in done.stdout, done.stderr
        assert not list(folder.glob("engine-tmp-ray-*"))
    finally:
        shutil.rmtree(folder)
