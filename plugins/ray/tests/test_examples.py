"""The example files for clusters are valid; the script for Slurm runs, on nodes that are namespaces."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from engine_plugin_testing.namespaces import two_nodes

FOLDER = Path(__file__).parents[3] / "examples" / "cluster"
SLURM = (FOLDER / "slurm_ray.sh").read_text()
JOB = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]


def test_the_script_for_slurm_is_a_script_of_bash():
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    subprocess.run([bash, "-n", str(FOLDER / "slurm_ray.sh")], check=True)


def test_both_set_the_runtime_and_its_address():
    for text in (SLURM, JOB["spec"]["entrypoint"]):
        assert "--set runtime.backend=ray" in text
        assert "runtime.ray.address=" in text


def test_both_ask_for_a_token():
    assert "RAY_AUTH_MODE=token" in SLURM
    assert CLUSTER["authOptions"] == {"mode": "token"}


def test_the_cluster_on_kubernetes_is_of_the_version_that_is_tried_and_its_nodes_see_one_folder():
    pinned = (FOLDER.parents[1] / "constraints.txt").read_text()
    assert f"ray=={CLUSTER['rayVersion']}\n" in pinned
    groups = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
    for group in groups:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert groups[1]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_the_job_on_kubernetes_has_the_fields_that_kuberay_requires():
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert JOB["metadata"]["name"]
    assert JOB["spec"]["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
    workers = CLUSTER["workerGroupSpecs"]
    for group in (CLUSTER["headGroupSpec"], *workers):
        # KubeRay takes texts alone
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        for container in group["template"]["spec"]["containers"]:
            assert container["name"]
            assert container["image"]
    assert len({group["groupName"] for group in workers}) == len(workers)
    for group in workers:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


SRUN = """#!/bin/bash
# what the script asks of Slurm, on two namespaces: the second node is the one that --exclude leaves
node=0
while [[ $1 == --* ]]; do [[ $1 == --exclude=* ]] && node=1; shift; done
names=({names}) addresses=({addresses})
if [ "$1" = hostname ]; then echo "${{addresses[0]}}"; exit; fi
if [ "$1 $2" = "ray start" ]; then
    set -- "$@" --num-cpus=1 --object-store-memory=100000000 --node-ip-address="${{addresses[$node]}}"
    [ $node = 1 ] && sleep 5  # a run that does not wait for it has no room for its sampler
fi
case $1 in
    ray) shift; set -- {python} -m ray.scripts.scripts "$@" ;;
    engine) shift; set -- {python} -m engine_core.cli.main "$@" ;;
    python) shift; set -- {python} "$@" ;;
esac
exec ip netns exec "${{names[$node]}}" "$@"
"""
SECONDS = 200.0


@pytest.mark.slow
def test_the_script_for_slurm_waits_for_its_nodes_and_saves_the_run_when_it_is_signalled(settings, tmp_path):
    shims = tmp_path / "bin"
    shims.mkdir()
    pools = ["placement.pools={ train = 1, serve = 1 }", "placement.actor=train", "placement.rollout=serve"]
    given = settings | {
        "run.steps": 5000,
        "rollout.weights": "own",
        "run.name": "r",
        "checkpoint.every_steps": 1,
    }
    given = {key: value for key, value in given.items() if key not in ("reward", "plugins")}
    lines = ['plugins = ["digits.py"]', *(f"{key} = {json.dumps(value)}" for key, value in given.items())]
    lines += [f"{key} = {value}" for key, value in (each.split("=", 1) for each in pools[:1])]
    lines += [
        'placement.actor = "train"',
        'placement.rollout = "serve"',
        '[[reward]]\nname = "digits"\nworkers = 0\n',
    ]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    with two_nodes() as nodes:
        names, addresses = " ".join(nodes.names), " ".join(nodes.addresses)
        (shims / "srun").write_text(SRUN.format(names=names, addresses=addresses, python=sys.executable))
        (shims / "scontrol").write_text("#!/bin/bash\nprintf 'a\\nb\\n'\n")
        (shims / "python").symlink_to(sys.executable)
        for name in ("srun", "scontrol"):
            (shims / name).chmod(0o755)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env = plain | {"PATH": f"{shims}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        env |= {"SLURM_JOB_NODELIST": "[a-b]", "SLURM_JOB_NUM_NODES": "2"}
        with (tmp_path / "said").open("w") as said:
            job = subprocess.Popen(
                ["bash", str(FOLDER / "slurm_ray.sh"), "run.toml"],
                cwd=tmp_path,
                env=env,
                stdout=said,
                stderr=said,
            )
        text, end = (tmp_path / "said").read_text, time.monotonic() + SECONDS
        try:
            while text().count("  reward ") < 3:
                assert job.poll() is None, text()
                assert time.monotonic() < end, text()
                time.sleep(0.2)
            job.send_signal(signal.SIGUSR1)
            assert job.wait(SECONDS) == 75, text()
        finally:
            job.kill()
            job.wait()
    assert "Stopped by SIGUSR1 after step" in text()
    assert not list(tmp_path.glob(".ray-token*"))
