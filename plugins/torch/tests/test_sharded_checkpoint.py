"""What an engine of several ranks keeps and gives away, in one process that is told its rank."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine_core.contracts.engines import Layout
from engine_core.contracts.weight_names import own_weights
from engine_core.types import LossCall
from engine_plugin_torch import sharded_checkpoint
from engine_plugin_torch.data_parallel import DataParallelEngine
from engine_plugin_torch.skeleton import Skeleton
from engine_plugin_torch.weights import published_weights


class Ranks:
    def __init__(self, rank, size):
        self.rank, self.size, self.layout = rank, size, Layout(rank, size)
        self.shared = []

    @property
    def described(self):
        return {"ranks": self.size, "ranks_per_slice": 1}

    def share(self, error, what):
        self.shared.append((error, what))
        if error is not None:
            raise error


class Engine(DataParallelEngine):
    """Its weights are whole, and their gathers are counted."""

    place = (0, 1)

    def _prepare(self):
        self.ranks = Ranks(*self.place)
        self.gathered = []

    def _shard(self, module, units):
        self.skeleton = Skeleton(module, self.device)
        return super()._shard(module, units)

    def _whole_weights(self):
        for name, tensor in own_weights(self.module).items():
            self.gathered.append(name)
            yield name, tensor.detach()

    def _published(self, adapter):
        return published_weights(self._plain, self._whole_weights())


@pytest.fixture
def engine_on(make_engine):
    def make(rank, size, **options):
        return make_engine("llama", cls=type("Ranked", (Engine,), {"place": (rank, size)}), **options)

    return make


def trained(engine, batch):
    """After one step of the reference engine, whose micro-batches need no ranks."""
    torch.manual_seed(0)
    for parameter in engine.module.parameters():
        parameter.grad = torch.randn_like(parameter)
    engine.optimizer_step()
    return engine


def test_the_reference_engine_loads_what_was_saved_and_goes_on(engine_on, make_engine, batch, tmp_path):
    engine = trained(engine_on(0, 1), batch)
    engine.save(tmp_path / "saved").result()
    assert (tmp_path / "saved" / "weights-00000-of-00001.safetensors").is_file()
    loaded = make_engine("llama")
    loaded.load(tmp_path / "saved")
    for name, tensor in own_weights(engine.module).items():
        assert torch.equal(own_weights(loaded.module)[name], tensor)
    for one in (engine.optimizer, loaded.optimizer):
        assert {float(values["step"]) for values in one.state.values()} == {1.0}
    loaded.forward_backward(batch, LossCall("nll"))
    loaded.optimizer_step()


def test_a_second_save_a_load_and_a_close_wait_for_the_first(engine_on, tmp_path):
    engine, written = engine_on(0, 1), threading.Event()
    waited = []
    engine.store.saver.wait = lambda: waited.append(written.set())
    engine.save(tmp_path / "one").result()
    assert len(waited) == 1
    engine.load(tmp_path / "one")
    assert len(waited) == 2
    engine.close()
    assert len(waited) == 3


def test_ranks_beside_the_leader_take_part_in_a_stream_and_get_nothing(engine_on):
    engine = engine_on(1, 2)
    assert list(engine.named_weights(to="leader")) == []
    assert engine.gathered == list(own_weights(engine.module))
    assert {name for name, _ in engine.named_weights()} == set(own_weights(engine.module))


def test_an_export_is_written_by_the_first_rank_alone(engine_on, tmp_path):
    engine_on(1, 2).export(tmp_path / "second")
    assert not (tmp_path / "second").exists()
    first = engine_on(0, 2)
    first.export(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    for name, tensor in own_weights(first.module).items():
        assert torch.equal(own_weights(model)[name], tensor)


def test_an_export_ends_at_the_tokenizers_end_token_too(engine_on, tokenizer, tmp_path):
    tokenizer.eos_token = "7"
    engine = engine_on(0, 2, live={"tokenizer": tokenizer})
    engine._plain.generation_config.eos_token_id = 96
    engine.export(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [96, 7]


def test_a_failed_export_gathers_to_the_end_and_is_told_to_all(engine_on, tmp_path, monkeypatch):
    engine = engine_on(0, 2)

    def full(folder, module, stream):
        next(stream)
        raise OSError("No space left on device")

    monkeypatch.setattr(sharded_checkpoint, "write_model", full)
    with pytest.raises(OSError, match="No space left"):
        engine.export(tmp_path / "model")
    assert engine.gathered == list(own_weights(engine.module))
    assert [what for _, what in engine.ranks.shared] == [f"Writing {tmp_path / 'model'}"]


def test_a_rank_samples_from_a_whole_copy_in_the_type_of_the_forward_pass(engine_on, batch):
    engine = engine_on(0, 2, param_dtype="fp32", compute_dtype="bf16")
    assert engine.lends_whole
    with engine.generation_module() as module:
        assert module is not engine.module
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        embedding = module.get_input_embeddings().weight
        assert torch.equal(embedding, engine.module.get_input_embeddings().weight.bfloat16())
    assert {p.device.type for p in module.parameters()} == {"meta"}


def test_a_module_of_which_there_is_no_copy_is_not_lent_to_several_ranks(engine_on):
    engine = engine_on(0, 2)
    engine.skeleton = None
    assert not engine.lends_whole
    engine.ranks.size = 1
    assert engine.lends_whole
    with engine.generation_module() as module:
        assert module is engine.module
