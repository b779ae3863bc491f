"""The Python of a pool is its environment's; one on which no worker would start is refused before any worker starts."""

import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from engine_core.errors import ConfigError
from engine_plugin_ray import environments
from engine_plugin_ray.environments import check_here, look, refuse, sent_whole

WHO = """
import sys
import time
from pathlib import Path

try:
    from only_there import NAME
except ImportError:
    NAME = "not there"
with Path({log!r}).open("a") as log:
    log.write(f"{{sys.executable}} {{NAME}}\\n")
"""
POOLS = {
    "placement.pools": {"train": 1, "serve": 1},
    "placement.actor": "train",
    "placement.rollout": "serve",
    "algorithm.kl_coef": 0.0,
    "runtime.backend": "ray",
    "run.steps": 1,
}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Return the Python of an environment that has one more package than this one."""
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    ours = [path for path in sys.path if path and Path(path).is_dir()]
    # `addsitedir` reads what editable installs of ours say, too
    (site / "ours.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    (site / "only_there.py").write_text('NAME = "there"\n')
    return str(folder / "bin" / "python")


def refusal(python):
    with pytest.raises(ConfigError) as caught:
        check_here({"serve": python})
    return str(caught.value)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_that_is_none_is_refused_with_the_key(tmp_path):
    at = "runtime.ray.python.serve = '{}' (on this machine): no Python runs there ("
    assert refusal("/no/such/python").startswith(at.format("/no/such/python") + "FileNotFoundError: ")
    broken = script(tmp_path / "broken", "echo cannot >&2; exit 3")
    assert refusal(broken).startswith(
        at.format(broken) + "it ended with 3: cannot). Expected the path of one"
    )


def test_a_python_that_does_not_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "SECONDS", 0.5)
    assert "no Python runs there (TimeoutExpired: " in refusal(script(tmp_path / "hangs", "exec sleep 60"))


def test_a_python_without_the_plugin_is_refused(tmp_path):
    bare = script(tmp_path / "bare", f'exec "{sys.executable}" -I -S "$@"')
    assert ": it has no ray, engine_plugin_ray, torch. Install engine-plugin-ray and " in refusal(bare)


@pytest.mark.parametrize("change", [{"ray": "2.1.0"}, {"python": "3.9.1"}])
def test_a_python_of_other_versions_is_refused_with_both(change):
    found = {"ray": ray.__version__, "python": platform.python_version(), "missing": []} | change
    with pytest.raises(ConfigError) as caught:
        refuse("serve", "/env/bin/python", "10.0.0.1", found)
    assert str(caught.value).startswith(
        f"runtime.ray.python.serve = '/env/bin/python' (on 10.0.0.1): it is of Ray {found['ray']} and Python "
        f"{found['python']}, and this is Ray {ray.__version__} and Python {platform.python_version()}. Make "
    )


def test_another_patch_of_the_same_python_is_taken(other):
    found = look(other)
    major, minor, _ = platform.python_version_tuple()
    refuse("serve", other, "this machine", found | {"python": f"{major}.{minor}.99"})


WITHOUT_PLUGIN = """
import sys
sys.modules["engine_plugin_ray"] = sys.modules["engine_core"] = None
import ray
function = ray.cloudpickle.loads(sys.stdin.buffer.read())
print(sorted(function(sys.executable)))
"""


def test_a_node_whose_own_python_has_no_plugin_looks_at_one_too():
    sent = ray.cloudpickle.dumps(sent_whole(look))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PLUGIN], input=sent, capture_output=True, timeout=120, check=False
    )
    assert done.stdout == b"['missing', 'python', 'ray']\n", done.stderr


@pytest.mark.slow
def test_a_pool_takes_its_packages_from_its_own_python_in_a_cluster_of_the_runs_own(
    other, settings, train_alone, tmp_path
):
    log = tmp_path / "who"
    (tmp_path / "who.py").write_text(WHO.format(log=str(log)))
    plugins = [*settings["plugins"], str(tmp_path / "who.py")]
    train_alone("ray", **POOLS, plugins=plugins, **{"runtime.ray.python": {"serve": other}})
    assert f"{other} there" in log.read_text().splitlines()
    assert {line for line in log.read_text().splitlines() if not line.startswith(other)} == {
        f"{sys.executable} not there"
    }


@pytest.mark.slow
def test_in_a_cluster_that_was_joined_it_is_looked_at_where_its_workers_will_be(
    cluster, other, train, tmp_path
):
    train("ray", **POOLS, **{"runtime.ray.python": {"serve": other}})
    with pytest.raises(
        ConfigError, match=r"^runtime\.ray\.python\.serve = '/no' \(on 127\.0\.0\.1\): no Python runs"
    ):
        train("none", **POOLS, **{"runtime.ray.python": {"serve": "/no"}})
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:  # the room is given back
        assert time.monotonic() < deadline
        time.sleep(0.1)
