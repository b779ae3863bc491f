"""Clusters that are joined, and those that are refused with the keys to change."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from engine_plugin_ray import cluster as module
from engine_plugin_ray.cluster import Cluster, _minor
from engine_plugin_ray.keeper import MARK

from engine_core.errors import ConfigError


def refusal(address):
    with pytest.raises(ConfigError) as caught:
        Cluster(address).join()
    return str(caught.value)


@pytest.mark.parametrize("address", ["head", ":6379", "head:ray"])
def test_an_address_without_a_host_or_a_port_is_refused(no_cluster, address):
    assert f"runtime.ray.address is '{address}'; expected HOST:PORT" in refusal(address)


def test_an_address_where_nobody_answers_is_refused(no_cluster):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"runtime.ray.address = '{address}': nobody answers there (" in refusal(address)


ANSWERS = [
    ({"ray": "2.1.0", "python": "3.11.2"}, "the cluster is of Ray 2.1.0 and Python 3.11.2, and this is Ray "),
    (
        {"error": "AuthenticationError: RPC error"},
        "the cluster asks for a token, and does not know ours (no token is",
    ),
    ({}, "what answers there is no Ray cluster."),
]


@pytest.mark.parametrize(("answer", "text"), ANSWERS)
def test_a_cluster_that_does_not_fit_is_refused_before_it_is_joined(answer, text, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(ConfigError) as caught:
        Cluster("head:6379")._meet(answer)
    assert str(caught.value).startswith("runtime.ray.address = 'head:6379': " + text)


def test_another_patch_of_python_is_no_other_version():
    import ray

    Cluster("head:6379")._meet({"ray": ray.__version__, "python": _minor(sys.version.split()[0]) + ".99"})


# -- against a real cluster ----------------------------------------------------------------------

JOIN = """
import sys
import tempfile
from pathlib import Path
from engine_core.errors import ConfigError
from engine_plugin_ray.cluster import Cluster, asks_for_token

try:
    made = Cluster(sys.argv[1])
    made.join()
    print("joined", asks_for_token())
    made.close()
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def join(cluster, tmp_path):
    """Another process that joins the cluster of this session, with a token or without."""
    import ray
    from engine_plugin_ray import cluster as module

    def run(**env):
        plain = {n: v for n, v in os.environ.items() if not n.startswith("RAY_") and n != MARK}
        command = [sys.executable, "-c", JOIN, ray.get_runtime_context().gcs_address]
        found = plain | {"HOME": str(tmp_path), **env}
        return subprocess.run(
            command, env=found, capture_output=True, text=True, timeout=120, check=False
        ).stdout

    run.token = module._TOKEN
    return run


@pytest.mark.slow
def test_who_knows_the_token_joins_and_nobody_else(join):
    assert "joined True" in join(RAY_AUTH_TOKEN=join.token)
    assert "does not know ours (no token is set here)" in join()
    assert "does not know ours (RAY_AUTH_TOKEN is set here)" in join(RAY_AUTH_TOKEN="ab" * 32)


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
