"""What a rank holds, by estimate."""

import pytest
import torch
from torch import nn
from transformers import Qwen3Config

from engine_core.config import ModelConfig, RoleConfig
from engine_core.contracts.memory import MemoryQuestion
from engine_plugin_fsdp.budget import FSDPBudget, held_by_rank
from engine_plugin_fsdp.engine import FSDPEngine
from engine_plugin_fsdp.options import FSDPOptions
from engine_plugin_torch.memory import Held
from engine_plugin_torch.precision import Precision

FP32, BF16 = torch.float32, torch.bfloat16
LAYER, REST = 8 * 8, 20 * 8  # weights
WEIGHTS = REST + 6 * LAYER
GIB = 2**30


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))


def held(precision=None, size=4, dtype=FP32, **options):
    model = Model().to(dtype)
    whole = Held.of(model, trained=True)
    return whole, held_by_rank(
        whole, model, FSDPOptions(**options), precision or Precision(FP32, BF16), size, "actor"
    )


def test_full_sharding_spreads_everything_but_sums_whole_gradients():
    whole, mine = held()
    assert (mine.weights, mine.optimizer) == (whole.weights // 4, whole.optimizer // 4)
    assert mine.gradients == whole.gradients
    assert mine.gathered == 2 * (REST + 2 * LAYER)  # bf16: the root, a unit and the next


def test_gradients_that_are_summed_each_time_are_spread_too():
    whole, mine = held(gradient_sync="each")
    assert mine.gradients == whole.gradients // 4


@pytest.mark.parametrize(
    ("options", "shards"),
    [
        ({"sharding": "none"}, 1),
        ({"sharding": "grad_op"}, 4),
        ({"reshard_after_forward": False}, 4),
        ({"sharding": "hybrid", "shard_group_size": 2, "reshard_after_forward": False}, 2),
    ],
)
def test_weights_that_stay_gathered_count_whole(options, shards):
    whole, mine = held(**options)
    assert mine.weights == whole.weights // shards
    assert mine.gathered == whole.weights // 2  # bf16


def test_hybrid_spreads_over_a_group():
    whole, mine = held(sharding="hybrid", shard_group_size=2)
    assert mine.weights == whole.weights // 2


def test_what_lies_in_host_memory_is_not_on_the_device():
    assert held(cpu_offload="optimizer")[1].optimizer == 0
    assert held(cpu_offload="params", gradient_sync="each")[1].total == held(gradient_sync="each")[1].gathered


def test_gradients_that_are_summed_once_lie_on_the_device_until_then_wherever_the_weights_lie():
    whole, mine = held(cpu_offload="params")
    assert (mine.weights, mine.gradients, mine.optimizer) == (0, whole.gradients, 0)


def test_whole_gradients_have_the_type_they_are_sent_in():
    assert held(mixed_precision={"reduce_dtype": "bf16"})[1].gradients == 2 * WEIGHTS
    half = held(Precision(BF16, BF16), dtype=BF16)
    assert half[0].gradients == 2 * WEIGHTS
    assert half[1].gradients == 4 * WEIGHTS


def share_of(how, chosen=False):
    options = FSDPOptions(activation_checkpointing=how)
    return FSDPBudget.share_of(options, chosen)


@pytest.mark.parametrize(
    ("how", "chosen", "share"),
    [
        ("none", True, 0),
        ("full", False, 1),
        ("auto", True, 1),
        ("auto", False, 0),
        (1, False, 1),
        (4, False, 0.25),
    ],
)
def test_every_nth_layer_counts_as_recomputed(how, chosen, share):
    assert share_of(how, chosen) == share


def test_gathered_weights_have_the_compute_type_so_autocast_copies_nothing():
    made = FSDPBudget.settings_of(Model(), FSDPOptions(), Precision(FP32, BF16), "actor", False, True)
    assert (made.param, made.compute) == (BF16, BF16)


@pytest.fixture(scope="module")
def need(tmp_path_factory):
    """Return ``need(free, ...)``: what two ranks that train a model of 0.6 billion weights would choose."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    Qwen3Config(**sizes, **heads).save_pretrained(folder)

    def ask(free, device=80, **options):
        config = RoleConfig(backend="fsdp", options=FSDPOptions(**options))
        size = {"device_bytes": device * GIB, "free": None if free is None else int(free * GIB)}
        question = MemoryQuestion("actor", trainable=True, ranks=2, tokens=1 << 20, length=768, **size)
        found = FSDPEngine.memory_need(config, ModelConfig(path=str(folder)), question)
        return tuple(found.chosen.get(f"fsdp.{key}") for key in ("gradient_sync", "activation_checkpointing"))

    return ask


def test_gradients_are_summed_each_time_where_activations_would_be_recomputed_otherwise(need):
    frees = [17, 18.5, 19, 21]
    last, each = ([need(free, gradient_sync=how)[1] for free in frees] for how in ("last", "each"))
    between = [free for free, *two in zip(frees, last, each, strict=True) if two == ["full", "none"]]
    assert between == [18.5, 19]  # more memory lets both keep activations, less lets neither
    assert {need(free) for free in between} == {("each", "none")}
    assert need(21) == ("last", "none")
    assert need(17) == ("last", "full")
    assert need(17, activation_checkpointing="none")[0] == "each"  # neither fits
    assert need(3)[0] == "each"  # whole gradients of 2.2 GiB, and 8192 tokens, do not fit
    assert need(21, activation_checkpointing="full")[0] == "last"


def test_before_the_free_memory_is_known_gradients_are_whole_where_the_device_holds_them(need):
    assert need(None)[0] == "last"
    assert need(None, device=4)[0] == "each"
    assert need(None, gradient_sync="last") == (None, "none")
