"""What is kept out of sharding, read by parts, and computed in other types, on two real ranks."""

import sys
from pathlib import Path

import pytest
import torch

from engine_core.errors import ConfigError
from engine_plugin_fsdp import fp8, start
from engine_plugin_fsdp.options import FSDPOptions
from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.launcher import Workers


class FSDP(TrainEngineSuite):
    backend = "fsdp"


RESUME = FSDP.contracts["test_a_resumed_run_continues_exactly"].case
SLEEP = FSDP.contracts["test_an_engine_that_slept_goes_on_as_if_it_had_not"].case
POISON = FSDP.contracts["test_a_gradient_that_is_not_finite_skips_the_step"].case
SAMPLER = FSDP.contracts["test_the_generation_module_gives_the_logits_of_the_policy"].case
EXPORT = FSDP.contracts["test_export_is_loaded_by_from_pretrained"].case
SUM = FSDP.contracts["test_gradients_add_up_over_calls"].case


@pytest.fixture(scope="module")
def ranks():
    group = Workers(2, root=Path(__file__).parent)

    def run(case, options=None, **settings):
        case = case if ":" in case else f"cases_parts.py:{case}"
        group.run(FSDP.bench, case, {**FSDP.settings(), "options": options or {}, **settings})

    yield run
    group.close()


@pytest.fixture
def ranks_with_torchao(monkeypatch):
    """Workers find it in the folder that ``make install`` made."""
    folder = Path(sys.prefix) / "torchao"
    if folder.is_dir():
        # workers are given the path of this process
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    else:
        pytest.importorskip("torchao")
    group = Workers(2, root=Path(__file__).parent)
    yield lambda case, **settings: group.run(FSDP.bench, f"cases_parts.py:{case}", FSDP.settings() | settings)
    group.close()


def test_sharded_tensors_are_gathered_whole_in_their_order(ranks):
    ranks("tensors_come_whole")


@pytest.mark.slow
def test_each_rank_reads_its_own_rows(ranks):
    ranks("parts_are_read")


@pytest.mark.slow
def test_folders_of_two_models_are_refused_on_every_rank(ranks):
    ranks("other_weights_on_a_machine", {"loading": "sharded"})


@pytest.mark.slow
def test_a_fresh_value_head_is_the_same_however_the_rest_is_read(ranks):
    ranks("a_head_is_fresh")


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_by_parts_is_refused_on_every_rank(ranks):
    ranks("a_folder_that_does_not_fit", {"loading": "sharded"})


@pytest.mark.parametrize("plugin", ["own_shards.py", "unequal_model.py"])
@pytest.mark.slow
def test_reading_by_parts_is_refused_where_a_plugin_makes_the_model(ranks, plugin):
    words = ["actor.fsdp.loading = 'sharded'", "a plugin builds or shards this model"]
    ranks("cases.py:refused_model", {"loading": "sharded"}, plugins=[plugin], words=words)


@pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize(("name", "lack"), [("bf16", "has_bf16"), ("fp16", "has_fp16")])
def test_a_type_that_the_device_has_not_is_refused_with_its_key(monkeypatch, key, name, lack):
    monkeypatch.setattr(start, lack, lambda device: False)  # no such device is here
    options = FSDPOptions(mixed_precision={key: name})
    compute = start.NAMED[name] if key == "param_dtype" else torch.float32
    with pytest.raises(ConfigError, match=rf"critic\.fsdp\.mixed_precision\.{key}: '{name}', but cpu has no"):
        start.check_types("critic.fsdp", options, compute, torch.device("cpu"))


def test_a_device_has_the_types_that_it_computes():
    start.check_types(
        "actor.fsdp",
        FSDPOptions(mixed_precision={"reduce_dtype": "bf16"}),
        torch.float16,
        torch.device("cpu"),
    )


@pytest.mark.slow
def test_a_gradient_of_products_in_8_bits_is_near_that_of_bf16(ranks_with_torchao):
    options = {"fp8": "rowwise", "mixed_precision": {"param_dtype": "bf16"}}
    ranks_with_torchao("eight_bits", options=options, plugins=["emulated_fp8.py"], backend="emulated")
    coarse = options | {"fp8": "tensorwise"}
    ranks_with_torchao(
        "one_scale_for_a_pack_is_no_leak", options=coarse, plugins=["emulated_fp8.py"], backend="emulated"
    )
    ranks_with_torchao("small_layers_are_refused")


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        (torch.device("cpu"), {"compute": torch.bfloat16}, "needs a GPU with products in 8 bits"),
        (torch.device("cpu"), {"compute": torch.float32, "emulated": True}, "param_dtype = 'bf16'"),
    ],
)
def test_8_bits_are_refused_where_nothing_computes_them(device, options, words):
    with pytest.raises(ConfigError, match=rf"actor\.fsdp\.fp8: 'rowwise' .*{words}"):
        fp8.check_fp8("actor.fsdp.fp8", "rowwise", device, **options)


@pytest.mark.parametrize(("recipe", "capability"), [("tensorwise", (8, 6)), ("rowwise", (8, 9))])
def test_8_bits_are_refused_on_a_gpu_that_is_too_old(monkeypatch, recipe, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)  # no GPU is here
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    with pytest.raises(ConfigError, match=r"actor\.fsdp\.fp8: .* but this role runs on an old one"):
        fp8.check_fp8("actor.fsdp.fp8", recipe, torch.device("cuda", 0), torch.bfloat16)


def test_8_bits_without_torchao_say_what_to_install(monkeypatch):
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'engine-plugin-fsdp\[fp8\]'"):
        fp8.check_fp8("actor.fsdp.fp8", "rowwise", torch.device("cpu"), torch.bfloat16, emulated=True)


@pytest.mark.parametrize(
    ("recipe", "shape", "worth"),
    [
        ("rowwise", (4096, 4096), True),
        ("rowwise", (2048, 8192), False),  # key and value projections
        ("rowwise", (4096, 2048), False),
        ("rowwise", (12288, 4090), False),  # 16 does not divide it
        ("tensorwise", (1024, 4096), False),
        ("tensorwise", (2048, 2048), True),
    ],
)
def test_small_layers_stay_as_they_are(recipe, shape, worth):
    assert fp8.is_worth(recipe, *shape) is worth
