"""Two nodes of Ray that see each other over a network alone: two network namespaces of this machine, joined by a cable.

Everything that goes from one node to the other (Ray's own traffic, rollouts, weights between pools) passes the cable,
since a namespace has a loopback of its own. What it does not show: two file systems, two clocks, a slow network.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAD, OTHER = "10.213.87.1", "10.213.87.2"
PORT = 6391
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENGINE = [sys.executable, "-m", "engine_core.cli.main"]
KEPT = re.compile(r"(actor|reward|tokens|response_length)/.*")


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def cannot():
    """Why there can be no namespaces; empty where there can."""
    if shutil.which("ip") is None:
        return "no program 'ip' (iproute2) here"
    name = f"probe-{os.getpid()}"
    made = ip("netns", "add", name)
    linked = ip("-n", name, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    ip("netns", "del", name)
    if made.returncode or linked.returncode:
        return f"network namespaces are not allowed here: {(made.stderr or linked.stderr).strip()}"
    return ""


@pytest.fixture
def nodes():
    """Runs a command in one of two namespaces."""
    if why := cannot():
        pytest.skip(why)
    names = [f"engine{number}-{os.getpid()}" for number in (0, 1)]
    cable = [f"veth{number}" for number in (0, 1)]
    try:
        for name in names:
            assert ip("netns", "add", name).returncode == 0
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "-n",
            names[0],
            "link",
            "add",
            cable[0],
            "type",
            "veth",
            "peer",
            "name",
            cable[1],
            "netns",
            names[1],
        )
        for name, end, address in zip(names, cable, (HEAD, OTHER), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            assert ip("-n", name, "link", "set", end, "up").returncode == 0
        yield names
    finally:
        for name in names:
            for pid in ip("netns", "pids", name).stdout.split():
                subprocess.run(["kill", "-9", pid], check=False)
            ip("netns", "del", name)


def run(node, command, env, cwd, seconds):
    return subprocess.run(
        ["ip", "netns", "exec", node, *command],
        env=env, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


def samples(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if KEPT.fullmatch(key)} for line in lines]


@pytest.mark.slow
def test_a_trainer_and_a_sampler_on_two_nodes_do_what_one_process_does(nodes, settings, tmp_path):
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = plain | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    own = ["--num-cpus=1", "--object-store-memory=100000000"]  # of a node: room for one process
    head = [f"--node-ip-address={HEAD}", f"--port={PORT}", "--include-dashboard=false", *own]
    started = run(nodes[0], [*RAY, "start", "--head", *head], env, tmp_path, 120)
    assert started.returncode == 0, started.stdout + started.stderr
    joined = [f"--address={HEAD}:{PORT}", f"--node-ip-address={OTHER}", *own]
    started = run(nodes[1], [*RAY, "start", *joined], env, tmp_path, 120)
    assert started.returncode == 0, started.stdout + started.stderr
    given = settings | {
        "run.steps": 1,
        "algorithm.kl_coef": 0.0,
        "checkpoint.every_steps": 0,
        "rollout.weights": "own",
    }
    given.pop("reward")
    base = [f"--set={key}={json.dumps(value)}" for key, value in given.items() if key != "plugins"]
    file = tmp_path / "run.toml"
    file.write_text('plugins = ["digits.py"]\n[[reward]]\nname = "digits"\nworkers = 0\n')
    pools = ["placement.pools={ train = 1, serve = 1 }", "placement.actor=train", "placement.rollout=serve"]
    ray = ["runtime.backend=ray", f"runtime.ray.address={HEAD}:{PORT}", *pools, "run.name=ray"]
    words = ["train", str(file), "--allow-code", *base]
    done = run(nodes[0], [*ENGINE, *words, *(f"--set={each}" for each in ray)], env, tmp_path, 200)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = subprocess.run(
        [*ENGINE, *words, "--set=run.name=local"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    (over_the_cable,) = samples(Path(given["run.dir"]) / "ray")
    assert [over_the_cable] == samples(Path(given["run.dir"]) / "local")
    carried = int(
        run(nodes[1], ["cat", "/sys/class/net/veth1/statistics/rx_bytes"], env, tmp_path, 20).stdout
    )
    lines = (Path(given["run.dir"]) / "ray" / "metrics.jsonl").read_text().splitlines()
    assert carried > json.loads(lines[0])["sync/bytes"] > 0  # the weights came over it
