"""The files for clusters are what their readers take them for; no cluster is started."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "examples" / "cluster"
SLURM = (FOLDER / "slurm.sh").read_text()
JOB = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]


def test_the_script_for_slurm_is_a_script_of_bash():
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    subprocess.run([bash, "-n", str(FOLDER / "slurm.sh")], check=True)


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
