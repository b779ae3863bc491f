"""An adapter under ZeRO's stages: one launch of each number of ranks runs the cases of ``lora_cases``.

A quick one is among those of ``test_zero``, whose ranks are there already.
"""

from pathlib import Path

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.launcher import Workers

IN_PARTS = {"param_persistence_threshold": 0}  # small weights, too


class DeepSpeed(TrainEngineSuite):
    backend = "deepspeed"


@pytest.fixture(scope="module")
def ranks():
    groups = {}

    def run(size, name, options=None, **settings):
        if size not in groups:
            groups[size] = Workers(size, root=Path(__file__).parent, deadline=240)
        settings = {**DeepSpeed.settings(), "options": options or {}, **settings}
        groups[size].run(DeepSpeed.bench, f"lora_cases.py:{name}", settings)

    yield run
    for group in groups.values():
        group.close()


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
STAGES = [
    pytest.param({"stage": 0}, id="0"),
    pytest.param({"stage": 1}, id="1"),
    pytest.param({"stage": 2}, id="2"),
    pytest.param({**IN_PARTS, **OFFLOADED, "offload_param": {"device": "cpu"}}, id="3-offload"),
    pytest.param({**IN_PARTS, "activation_checkpointing": True}, id="3-recompute"),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", STAGES)
def test_an_adapter_learns_as_in_one_process(ranks, options):
    ranks(2, "an_adapter_learns_as_alone", options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [{"dora": True}, {"modules_to_save": ["norm"]}, {"target_modules": ["embed_tokens", "q_proj"]}],
    ids=["dora", "whole", "embeddings"],
)
@pytest.mark.parametrize("options", [{"stage": 2}, IN_PARTS], ids=["2", "3"])
def test_other_adapters_learn_as_in_one_process(ranks, options, lora):
    ranks(2, "an_adapter_learns_as_alone", options, adapter=lora, tied=False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_the_adapter_is_trained_and_saved(ranks, stage):
    ranks(2, "only_the_adapter_is_trained", {"stage": stage})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stage": 2}, IN_PARTS], ids=["2", "3"])
@pytest.mark.parametrize("lora", [{}, {"dora": True}, {"modules_to_save": ["norm"]}], ids=str)
def test_weights_that_come_are_taken(ranks, options, lora):
    ranks(2, "weights_that_come_are_taken", options, adapter=lora)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("deepspeed", 2, IN_PARTS), ("torch", 1, {})),
        (("torch", 1, {}), ("deepspeed", 2, {"stage": 2})),
        (("deepspeed", 2, {"stage": 1}), ("deepspeed", 1, IN_PARTS)),
        (("fsdp", 2, {}), ("deepspeed", 2, IN_PARTS)),
    ],
    ids=lambda value: f"{value[0]}{value[1]}",
)
def test_a_run_with_an_adapter_goes_on_elsewhere(ranks, tmp_path, saved, loaded):
    for (backend, size, options), name in ((saved, "save_for_another"), (loaded, "go_on_from_another")):
        ranks(size, name, options, backend=backend, shared=str(tmp_path))
