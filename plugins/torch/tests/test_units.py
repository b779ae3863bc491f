"""Units that are recomputed and compiled: other ways to the same numbers."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch._inductor.exc
from torch import nn

from engine_core.types import LossCall
from engine_plugin_torch import units
from engine_plugin_torch.attention import packed
from engine_plugin_torch.log_probs import gather_outputs

NLL = LossCall("nll")
LENGTHS = [7, 23, 1, 12, 5, 12, 2, 9]


def gradients(engine):
    return {name: p.grad.cpu().clone() for name, p in engine.module.named_parameters() if p.requires_grad}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= 1e-5 * float(value.norm()), name


@pytest.fixture
def no_compiler(monkeypatch):
    """torch.compile as it fails where there is no compiler; returns the functions that were tried."""
    tried = []

    def compile_and_fail(function, **settings):
        def fails(*args, **kwargs):
            tried.append(function)
            raise torch._inductor.exc.InductorError(RuntimeError("no working C++ compiler"), None)

        return fails

    monkeypatch.setattr(torch, "compile", compile_and_fail)
    return tried


@pytest.mark.parametrize("lora", [None, {"rank": 2, "modules_to_save": ["norm"]}], ids=["all", "lora"])
@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("inductor", marks=pytest.mark.slow)],  # a minute of the C++ compiler
)
def test_compiled_and_recomputed_units_give_the_same_loss_and_gradient(
    make_engine, batch_of, monkeypatch, backend, lora
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    batch = batch_of(LENGTHS, temperature=0.7)
    plain = make_engine("qwen3", budget=40, lora=lora, log_prob_chunk_tokens=8)
    expected = plain.forward_backward(batch, NLL)
    fast = make_engine(
        "qwen3",
        budget=40,
        lora=lora,
        log_prob_chunk_tokens=8,
        log_prob_recompute=False,
        compile=True,
        activation_checkpointing=True,
    )
    before = fast.infer(batch, ["log_probs"])["log_probs"]
    found = fast.forward_backward(batch, NLL)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert_close(gradients(fast), gradients(plain))
    layers = [fast.module.get_submodule(name) for name in units.decoder_layers(fast.module)]
    assert all(layer.forward.args[1].compiled is not None for layer in layers)  # none fell back
    offsets = batch.offsets.tolist()
    for indices, micro in fast._micro_batches(batch):  # the ratio of an unchanged policy is exactly 1
        with_gradient = fast._outputs(micro, ["log_probs"])["log_probs"]
        places = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in indices])
        torch.testing.assert_close(with_gradient.detach().cpu(), before[places], rtol=0, atol=0)


def test_what_cannot_be_compiled_runs_as_it_is_and_the_log_says_so(no_compiler, caplog):
    unit = units.CompiledForward(lambda x: 2 * x, "layers.3")
    with caplog.at_level(logging.WARNING, logger="engine"), packed():
        assert unit(21) == 42
        assert unit(4) == 8
    assert len(no_compiler) == 1  # not tried again
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "layers.3 cannot be compiled and runs as it is"
    ]


def test_what_computes_log_probs_is_compiled_whole(monkeypatch):
    graphs = []

    def count(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes])
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    project, rows = torch.nn.Linear(4, 9), torch.randn(6, 4)
    ids = torch.tensor([[0, 3], [8, 2], [5, 4], [1, 0], [2, 6], [7, 1]])
    arguments = {
        "targets": ids[:, 0],
        "temperature": 0.7,
        "chunk": 3,
        "grad": ("log_probs", "log_probs_at", "log_rest"),
        "watched": ("entropy", "sum_pi_squared", "top_ids", "top_log_probs", "top_log_rest"),
        "columns": {"candidate_ids": ids},
        "top_k": 2,
    }
    found = gather_outputs(project, rows, **arguments, compile=True)
    assert len(graphs) == 1
    assert any("logsumexp" in name for name in graphs[0])
    torch.testing.assert_close(found, gather_outputs(project, rows, **arguments), rtol=0, atol=0)


def test_log_probs_that_cannot_be_compiled_are_the_same_and_the_log_says_so(no_compiler, caplog, monkeypatch):
    monkeypatch.setattr(units, "_PLAIN", set())
    project, rows = torch.nn.Linear(4, 9), torch.randn(5, 4)
    targets = torch.tensor([0, 8, 3, 3, 1])

    def of(compile):
        mine = rows.clone().requires_grad_()
        found = gather_outputs(project, mine, targets, temperature=0.7, chunk=2, compile=compile)["log_probs"]
        found.square().sum().backward()
        return found, mine.grad

    with caplog.at_level(logging.WARNING, logger="engine"):
        torch.testing.assert_close(of(True), of(False), rtol=0, atol=0)
        of(True)
    assert len(no_compiler) == 1  # for all chunks and calls
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "What computes log-probs cannot be compiled and runs as it is"
    ]


def test_a_mistake_in_the_model_itself_is_not_taken_for_one_of_the_compiler(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    unit = units.CompiledForward(lambda: [][0], "layers.3")
    with packed(), pytest.raises(IndexError):
        unit()


def test_outside_of_a_packed_forward_a_unit_is_not_compiled(no_compiler):
    unit = units.CompiledForward(lambda x: 2 * x, "layers.3")
    assert unit(21) == 42
    assert not no_compiler


@pytest.mark.parametrize("recomputed", [False, True])
def test_more_layers_need_no_more_graphs(monkeypatch, recomputed):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))

    def graphs(layers, learned):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(layers))
        names = [str(index) for index in range(layers)]
        units.compile_units(module, names)
        if recomputed:
            units.checkpoint_units(module, names)
        for length in (5, 9, 30):
            hidden = torch.ones(length, 4, requires_grad=learned)
            with packed():
                for layer in module:
                    hidden = layer(hidden)
            hidden.sum().backward()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert 0 < graphs(2, True) == graphs(8, True) == graphs(8, False)  # False: behind frozen embeddings


def test_the_tests_before_the_first_use_compile_nothing(make_engine, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    engine = make_engine("qwen3", compile=True)
    engine.forward.settle()
    assert engine.forward.packs
    assert not torch._dynamo.utils.counters["stats"]
