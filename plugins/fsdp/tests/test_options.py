"""What the options of a run file may say together."""

import pytest
from pydantic import ValidationError

from engine_plugin_fsdp.options import FSDPOptions


def test_a_resolved_table_which_sets_every_key_reads_back():
    """As a run folder has it, and as the workers of a run get it."""
    assert FSDPOptions.model_validate(FSDPOptions().model_dump(mode="json")) == FSDPOptions()


def test_a_loss_scale_without_fp16_is_refused():
    with pytest.raises(ValidationError, match="loss_scale has no effect"):
        FSDPOptions(loss_scale=2.0)
    assert FSDPOptions(loss_scale=2.0, mixed_precision={"param_dtype": "fp16"}).loss_scale == 2.0


@pytest.mark.parametrize("name", ["sp", "tp"])
def test_ranks_that_share_a_pack_compile_nothing(name):
    with pytest.raises(ValidationError, match=f"{name} 2 cannot be combined with compile"):
        FSDPOptions(**{name: 2, "compile": True})
    assert not FSDPOptions(**{name: 2}).compiles(accelerator=True, quantized=False)


def test_forward_passes_are_compiled_by_default_on_an_accelerator_alone():
    assert FSDPOptions().compiles(accelerator=True, quantized=False)
    assert not FSDPOptions().compiles(accelerator=False, quantized=False)
    assert not FSDPOptions().compiles(accelerator=True, quantized=True)


@pytest.mark.parametrize("sharding", ["grad_op", "none"])
def test_weights_that_stay_gathered_are_not_freed_after_the_forward_pass(sharding):
    with pytest.raises(
        ValidationError, match=f"reshard_after_forward true contradicts sharding '{sharding}'"
    ):
        FSDPOptions(sharding=sharding, reshard_after_forward=True)
    assert FSDPOptions(sharding=sharding, reshard_after_forward=False).keeps_gathered
