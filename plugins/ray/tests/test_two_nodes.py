"""Two nodes of Ray that share only a network: two network namespaces of this machine, connected by a virtual cable.

All traffic between the nodes (Ray's own, rollouts, weights between pools) passes the cable, since each namespace has
its own loopback. Not covered: two file systems, two clocks, a slow network.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_plugin_testing.namespaces import Nodes, two_nodes

HEAD, OTHER = Nodes.addresses
PORT = 6391
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENGINE = [sys.executable, "-m", "engine_core.cli.main"]
MISSED_SECONDS = 45.0  # it takes 15 to 25; Ray says so after 60
KEPT = re.compile(r"(actor|reward|tokens|response_length)/.*")


def samples(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if KEPT.fullmatch(key)} for line in lines]


@pytest.fixture
def nodes(tmp_path):
    """Start two nodes of a Ray cluster, with room for one process each; ``env`` is the environment on them."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with two_nodes() as made:
        made.env = plain | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        own = ["--num-cpus=1", "--object-store-memory=100000000"]
        head = ["--head", f"--node-ip-address={HEAD}", f"--port={PORT}", "--include-dashboard=false", *own]
        for node, words in enumerate(
            (head, [f"--address={HEAD}:{PORT}", f"--node-ip-address={OTHER}", *own])
        ):
            started = made.run(node, [*RAY, "start", *words], made.env, tmp_path, 120)
            assert started.returncode == 0, started.stdout + started.stderr
        yield made


@pytest.fixture
def words(settings, tmp_path):
    """Return a function that returns a command that trains, with changes to its run file.

    Actor and sampler are on different nodes unless it is ``local``.
    """
    (tmp_path / "run.toml").write_text('plugins = ["digits.py"]\n[[reward]]\nname = "digits"\nworkers = 0\n')
    pools = ["placement.pools={ train = 1, serve = 1 }", "placement.actor=train", "placement.rollout=serve"]
    ray = ["runtime.backend=ray", f"runtime.ray.address={HEAD}:{PORT}", *pools]

    def command(name, local=False, **changes):
        given = settings | {"algorithm.kl_coef": 0.0, "rollout.weights": "own", "run.name": name} | changes
        given = {key: value for key, value in given.items() if key not in ("reward", "plugins")}
        base = [f"--set={key}={json.dumps(value)}" for key, value in given.items()]
        sets = [] if local else [f"--set={each}" for each in ray]
        return [*ENGINE, "train", str(tmp_path / "run.toml"), "--allow-code", *base, *sets]

    command.folder = Path(settings["run.dir"])
    return command


@pytest.mark.slow
def test_a_trainer_and_a_sampler_on_two_nodes_do_what_one_process_does(nodes, words, tmp_path):
    one = {"run.steps": 1, "checkpoint.every_steps": 0}
    done = nodes.run(0, words("ray", **one), nodes.env, tmp_path, 200)
    assert done.returncode == 0, done.stdout + done.stderr
    local = words("local", local=True, **one)
    alone = subprocess.run(local, env=nodes.env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    (over_the_cable,) = samples(words.folder / "ray")
    assert [over_the_cable] == samples(words.folder / "local")
    lines = (words.folder / "ray" / "metrics.jsonl").read_text().splitlines()
    received = max(map(nodes.received, (0, 1)))  # Ray puts the sampler on either node
    assert received > json.loads(lines[0])["sync/bytes"] > 0  # the weights came over it


@pytest.mark.slow
def test_a_node_whose_cable_is_cut_is_missed_long_before_ray_misses_it(nodes, words, tmp_path):
    with (tmp_path / "err").open("w") as said:
        run = nodes.start(0, words("cut", **{"run.steps": 5000}), nodes.env, tmp_path, said)
    text = (tmp_path / "err").read_text
    until(lambda: text().count("  reward ") >= 3, text, 200)
    (seat,) = [pid for pid in nodes.processes(1) if is_seat(pid)]
    nodes.cut()
    who = r"(actor\[0\]|rollout\[1\]) on \S+"  # Ray puts either on the other node
    until(lambda: re.search(rf"{who}:? (its host )?does not answer", text()), text, MISSED_SECONDS)
    assert run.wait(120) == 6
    until(lambda: not is_seat(seat), text, MISSED_SECONDS)  # it has missed the controller's node too
    assert "The newest checkpoint is of step" in text()


def until(found, text, seconds):
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, text()
        time.sleep(0.1)


def is_seat(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::Seat")
    except OSError:
        return False
