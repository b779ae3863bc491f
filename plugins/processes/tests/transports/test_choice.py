"""Which transport a run uses, and what is refused before it starts."""

import logging

import pytest
import torch

from engine_core import load_config
from engine_core.config.assemble import plugins_for
from engine_core.config.completeness import check_complete
from engine_core.errors import ConfigError
from engine_plugin_processes.transports.choice import ProcessDevice, Topology, choose, gpu_uuid, make
from engine_plugin_processes.transports.ipc import IPC
from engine_plugin_processes.transports.table import IPCOptions
from engine_plugin_processes.transports.tcp import TCP

POOLS = {
    "runtime.backend": "torchrun",
    "placement.pools": {"a": 1, "b": 2},
    "placement.actor": "a",
    "placement.rollout": "b",
}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')

    def load(**changes):
        settings = {"model.path": "some/model", "data.train": str(tmp_path / "train.jsonl")}
        return load_config({**settings, "reward": [{"name": "numeric"}], **changes})

    return load


CPU, XPU = ProcessDevice(), ProcessDevice("xpu")


def gpu(name):
    return ProcessDevice("cuda", name)


@pytest.mark.parametrize(
    ("topology", "name", "why"),
    [
        (Topology(False), "same_process", "in the actor's processes"),
        (Topology(False, (gpu("a"), gpu("a"))), "same_process", "in the actor's processes"),
        (Topology(True), "tcp", "one separate process"),
        (Topology(True, (CPU, CPU, CPU)), "broadcast", "2 separate processes"),
        (Topology(True, (CPU, CPU, CPU), True, True), "broadcast", "2 separate processes"),
        (Topology(True, (gpu("a"), gpu("b"))), "broadcast", "each of the 2 ends has its own GPU"),
        (
            Topology(True, (gpu("a"), gpu("b"), gpu("c")), True),
            "broadcast",
            "each of the 3 ends has its own GPU",
        ),
        (Topology(True, (gpu("a"), gpu("a")), True), "ipc", "ends share a GPU, which NCCL refuses"),
        (Topology(True, (gpu("a"), gpu("b"), gpu("b")), True), "ipc", "ends share a GPU"),
        (Topology(True, (gpu("a"), gpu("a"))), "tcp", "need not be on one machine"),
        (Topology(True, (gpu("a"), gpu("b")), True, True), "tcp", "samplers may be lost one by one"),
        (Topology(True, (gpu("a"), CPU)), "tcp", "not every end is on a CUDA device (there are cpu, cuda)"),
        (Topology(True, (XPU, XPU), True), "tcp", "not every end is on a CUDA device (there are xpu)"),
    ],
)
def test_auto_chooses_by_where_actor_and_sampler_are_and_says_why(config, caplog, topology, name, why):
    made = config()
    with caplog.at_level(logging.INFO, "engine"):
        assert choose(made, topology) == name
    assert why in caplog.text


def test_a_cpu_has_no_gpu_uuid():
    assert gpu_uuid(torch.device("cpu")) == ""


def test_shared_memory_is_refused_where_the_run_need_not_be_on_one_machine():
    with pytest.raises(ConfigError, match=r"rollout\.transport: got 'ipc', which needs .* on one machine"):
        IPC.check(IPCOptions(), one_machine=False)
    IPC.check(IPCOptions(), one_machine=True)


def test_a_name_is_taken_with_its_table_and_another_is_made_of_its_defaults(config):
    made = config(**POOLS, **{"rollout.transport": "ipc", "rollout.ipc.timeout_seconds": 3})
    kind, options = make(made, plugins_for(made), choose(made, Topology(True)))
    assert (kind, options.timeout_seconds) == (IPC, 3)
    assert make(made, plugins_for(made), "tcp")[0] is TCP


@pytest.mark.parametrize("name", ["tcp", "broadcast", "ipc"])
def test_one_between_processes_is_refused_where_the_sampler_is_with_the_actor(config, name):
    with pytest.raises(
        ConfigError, match=rf"rollout\.transport: got '{name}'.* the sampler is in the actor's processes"
    ):
        check_complete(config(**{"rollout.transport": name}))


def test_one_within_a_process_is_refused_where_the_sampler_has_a_pool_of_its_own(config):
    with pytest.raises(
        ConfigError,
        match=r"rollout\.transport: got 'same_process'.* the sampler is in pool 'b', the actor in 'a'",
    ):
        check_complete(config(**POOLS, **{"rollout.transport": "same_process"}))
    check_complete(config(**{"rollout.transport": "same_process"}))
    check_complete(config(**POOLS, **{"rollout.transport": "broadcast"}))


def test_an_unknown_one_is_refused_with_the_nearest_known(config):
    with pytest.raises(Exception, match=r"rollout\.transport: .*'broadcats'.*'broadcast'"):
        config(**{"rollout.transport": "broadcats"})


def test_a_plugin_of_one_file_can_bring_one(config, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from engine_core import hookimpl\nfrom engine_core.specs import TransportSpec\n"
        "@hookimpl\ndef engine_weight_transports():\n"
        "    return {'pigeon': TransportSpec(load='engine_plugin_processes.transports.tcp:TCP')}\n"
    )
    (tmp_path / "run.toml").write_text('plugins = ["mine.py"]\n[rollout]\ntransport = "pigeon"\n')
    made = load_config(tmp_path / "run.toml", {**POOLS, "reward": [{"name": "numeric"}]})
    assert make(made, plugins_for(made), choose(made, Topology(True)))[0] is TCP
