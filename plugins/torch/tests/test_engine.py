"""The reference engine against a slow one: a sequence at a time, whole logits, float64."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_core.types import LossCall

NLL = LossCall("nll")
FAMILIES = ["qwen3", "llama", "gemma2", "mistral", "granite", "qwen3_moe"]


def slow_reference(engine, batch):
    """Log-probs, entropies [T] and gradients of sum(-weights * log_probs), in float64, unpacked, eager."""
    model = AutoModelForCausalLM.from_config(
        engine.module.config, attn_implementation="eager", dtype=torch.float64
    )
    model.load_state_dict({name: value.cpu().double() for name, value in engine.module.state_dict().items()})
    model.eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused one has no float64
    log_probs, entropies = [], []
    for ids, mask in zip(
        batch.token_ids.split(batch.lengths.tolist()),
        batch["loss_mask"].split(batch.lengths.tolist()),
        strict=True,
    ):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double() / batch.temperature
        spread = torch.log_softmax(logits, -1)
        here = spread[:-1].gather(1, ids[1:, None])[:, 0] * mask[1:]
        log_probs.append(torch.cat([here.new_zeros(1), here]))
        entropy = -(spread.exp() * spread).sum(-1)[:-1] * mask[1:]
        entropies.append(torch.cat([entropy.new_zeros(1), entropy]))
    log_probs, entropies = torch.cat(log_probs), torch.cat(entropies)
    (-batch["weights"].double() * log_probs).sum().backward()
    return log_probs.detach(), entropies.detach(), {n: p.grad for n, p in model.named_parameters()}


def gradients(engine):
    return {name: p.grad.cpu().clone() for name, p in engine.module.named_parameters()}


def largest_relative_difference(found, expected):
    """Per parameter: norm of the difference over norm."""
    assert found.keys() == expected.keys()
    return max(float((found[n].double() - expected[n]).norm() / expected[n].norm()) for n in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropies_and_gradients_are_those_of_the_slow_reference(make_engine, batch_of, family):
    engine = make_engine(family, budget=40, log_prob_chunk_tokens=8)
    batch = batch_of([7, 23, 1, 12, 5, 12, 2, 9], temperature=0.7)
    log_probs, entropies, expected = slow_reference(engine, batch)
    found = engine.infer(batch, ["log_probs", "entropy"])
    assert engine.forward.head is not None  # taken apart, not the fallback
    assert engine.forward.packs
    torch.testing.assert_close(found["log_probs"].double(), log_probs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(found["entropy"].double(), entropies, rtol=1e-5, atol=2e-5)
    output = engine.forward_backward(batch, NLL)
    assert output.loss == pytest.approx(float(-(batch["weights"] * log_probs).sum()), rel=1e-5)
    assert largest_relative_difference(gradients(engine), expected) < 1e-5


def capture(engine):
    """Makes ``forward_backward`` keep the log-probs that its loss saw; returns the list of them."""
    seen = []
    resolve = engine._resolve

    def with_capture(loss):
        objective = resolve(loss)

        def objective_and_note(outputs, micro):
            seen.append((micro.token_ids, outputs["log_probs"].detach().cpu()))
            return objective(outputs, micro)

        return objective_and_note

    engine._resolve = with_capture
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_results_do_not_depend_on_the_micro_batch_split(make_engine, batch, family):
    results = {}
    for budget in (23, 40, 4096):
        engine = make_engine(family, budget=budget)
        output = engine.forward_backward(batch, NLL)
        results[budget] = output, gradients(engine)
    counts = [output.num_micro_batches for output, _ in results.values()]
    assert counts[0] > counts[1] > counts[2] == 1
    whole, expected = results[4096]
    for output, found in results.values():
        assert output.loss == pytest.approx(whole.loss, rel=1e-6)
        assert output.metrics["actor/nll"] == pytest.approx(whole.metrics["actor/nll"], rel=1e-6)
        assert largest_relative_difference(found, {n: g.double() for n, g in expected.items()}) < 1e-5


def test_two_mini_batches_add_their_gradients(make_engine, batch):
    engine = make_engine()
    engine.forward_backward(batch, NLL)
    once = gradients(engine)
    engine.forward_backward(batch, NLL)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, 2 * once[name])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": True},
        {"compute_dtype": "bf16"},
        {"param_dtype": "bf16"},
        {"family": "gemma2"},
    ],
)
def test_training_sees_bit_for_bit_the_log_probs_of_infer(make_engine, batch, options):
    engine = make_engine(budget=40, **options)
    expected = engine.infer(batch, ["log_probs"])["log_probs"]
    seen = capture(engine)
    engine.forward_backward(batch, NLL)
    found = torch.cat([log_probs for _, log_probs in seen])
    plan = [i for indices, _ in engine._micro_batches(batch) for i in indices]
    assert torch.equal(found, batch.with_columns({"expected": expected}).select(plan)["expected"])


def test_infer_answers_in_float32_on_the_cpu_at_loss_tokens_only(make_engine, batch):
    found = make_engine(param_dtype="bf16").infer(batch, ["log_probs"])["log_probs"]
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    assert torch.equal(found != 0, batch["loss_mask"])


def test_a_loss_token_at_the_start_of_a_sequence_has_log_prob_0(make_engine, batch):
    everything = batch.with_columns({"loss_mask": torch.ones_like(batch["loss_mask"])})
    found = make_engine().infer(everything, ["log_probs"])["log_probs"]
    firsts = batch.offsets[:-1]
    assert torch.equal((found == 0).nonzero()[:, 0], firsts)


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_changed_sequence_leaves_the_others_of_its_pack_alone(make_engine, batch, family, attention):
    engine = make_engine(family, model={"attention": attention})
    before = engine.infer(batch, ["log_probs"])["log_probs"]
    changed = batch.token_ids.clone()
    changed[7:30] = (changed[7:30] + 11) % 97  # the second sequence
    batch.token_ids = changed
    after = engine.infer(batch, ["log_probs"])["log_probs"]
    others = batch.sequence_index != 1
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
    assert not torch.allclose(after[~others], before[~others])
    assert engine.forward.packs


class LargestLogits(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most rows of any tensor whose last dimension is the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


def test_logits_exist_for_one_chunk_at_a_time_in_the_backward_pass_too(make_engine, batch_of):
    engine = make_engine(log_prob_chunk_tokens=40)
    batch = batch_of([60] * 5)
    engine.infer(batch_of([4]), ["log_probs"])  # the trial on a few tokens
    with LargestLogits(97) as watch:
        engine.infer(batch, ["log_probs", "entropy"])
        engine.forward_backward(batch, NLL)
    assert watch.rows == 40


def test_entropy_has_a_gradient_only_where_the_loss_differentiates_it(make_engine, batch):
    engine = make_engine()
    seen = {}
    engine._resolve = lambda loss: (
        lambda outputs, micro: (seen.update(outputs) or outputs["log_probs"].sum(), {})
    )
    engine.forward_backward(batch, LossCall("any", outputs=("log_probs",), watched=("entropy",)))
    assert not seen["entropy"].requires_grad
    log_probs_only = gradients(engine)
    engine.module.zero_grad()
    engine._resolve = lambda loss: lambda outputs, micro: (outputs["entropy"].sum(), {})
    engine.forward_backward(batch, LossCall("any", outputs=("log_probs", "entropy")))
    assert any(not torch.allclose(g, log_probs_only[n]) for n, g in gradients(engine).items())


def test_a_batch_without_loss_tokens_has_loss_0_and_moves_nothing(make_engine, batch):
    engine = make_engine()
    nothing = torch.zeros_like(batch["loss_mask"])
    empty = batch.with_columns(
        {"loss_mask": nothing, "weights": nothing.float(), "token_share": nothing.float()}
    )
    before = {name: value.cpu().clone() for name, value in engine.named_weights()}
    assert engine.forward_backward(empty, NLL).loss == 0
    step = engine.optimizer_step()
    assert (step.grad_norm, step.skipped) == (0.0, False)
    assert all(torch.equal(before[name], value.cpu()) for name, value in engine.named_weights())


def test_loss_tokens_that_nothing_predicts_give_gradients_of_0(make_engine, batch_of):
    engine = make_engine()
    batch = batch_of([1, 1])
    everything = torch.ones(2)
    batch = batch.with_columns(
        {"loss_mask": everything.bool(), "weights": everything, "token_share": everything / 2}
    )
    assert engine.forward_backward(batch, NLL).loss == 0
    assert not any(gradient.any() for gradient in gradients(engine).values())


def test_an_unknown_output_is_named(make_engine, batch):
    with pytest.raises(
        ValueError,
        match=r"Unknown output 'entropi' of TorchEngine in the role 'actor'\. Did you mean 'entropy'\?",
    ):
        make_engine().infer(batch, ["entropi"])
    with pytest.raises(
        ValueError,
        match=r"Unknown output 'values' of TorchEngine in the role 'actor'\. Known: entropy, log_probs",
    ):
        make_engine().forward_backward(batch, LossCall("nll", outputs=("values",)))


def test_a_temperature_of_0_is_refused(make_engine, batch_of):
    with pytest.raises(ValueError, match=r"temperature of log-probs is 0.*over 0"):
        make_engine().infer(batch_of([5], temperature=0.0), ["log_probs"])
