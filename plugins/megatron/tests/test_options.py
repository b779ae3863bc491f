"""What the options of a run file may say together, and what of a run is refused before its model is read."""

import pytest
import torch
from pydantic import ValidationError

from engine_core.config import RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.errors import ConfigError
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_megatron.engine import MegatronEngine
from engine_plugin_megatron.options import MegatronOptions


def test_a_resolved_table_which_sets_every_key_reads_back():
    """As a run folder has it, and as the workers of a run get it."""
    assert MegatronOptions.model_validate(MegatronOptions().model_dump(mode="json")) == MegatronOptions()


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"virtual_pp": 2}, "virtual_pp 2 has no effect with pp 1"),
        ({"sequence_parallel": True}, "sequence_parallel has no effect with tp 1"),
        ({"overlap_param_gather": True}, "overlap_param_gather needs"),
        ({"compute_dtype": "fp32", "grad_reduce_dtype": "bf16"}, "grad_reduce_dtype 'bf16'"),
        ({"compute_dtype": "fp16", "grad_reduce_dtype": "bf16"}, "over compute_dtype 'fp16'"),
        ({"loss_scale": 2.0}, "loss_scale has no effect without compute_dtype = 'fp16'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(table, told):
    with pytest.raises(ValidationError, match=told):
        MegatronOptions(**table)


def refused(options=None, name="actor", mixed=False, **role):
    context = WorkerContext(PluginSet.load({}), name, torch.device("cpu"), world_size=2, mixed=mixed)
    config = RoleConfig(backend="megatron", options=MegatronOptions(**(options or {})), **role)
    with pytest.raises(ConfigError) as raised:
        MegatronEngine.check(config, context)
    return str(raised.value)


def test_a_layout_is_refused_before_the_machine_is_looked_at():
    assert "tp = 2, pp = 1" in refused({"tp": 3})


def test_adapters_are_refused_with_what_trains_them():
    told = refused(lora={"rank": 4})
    assert "[actor.lora]: 'megatron' trains no adapters yet: peft's are of transformers' layers" in told


def test_shares_of_the_actor_are_not_mixed_into_weights_of_16_bits():
    told = refused({"compute_dtype": "bf16", "cpu_emulation": True}, "ref", mixed=True)
    assert "ref_refresh_mix is below 1, and the weights of the role 'ref' are bf16" in told
    assert "Set ref.megatron.compute_dtype = 'fp32', or algorithm.ref_refresh_mix = 1." in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_machine_without_cuda_is_refused_with_what_runs_there():
    assert (
        "this machine has none. To try the run file on a CPU set actor.megatron.cpu_emulation = true."
        in refused()
    )
