"""Contracts of ``TrainEngine.infer``: its outputs are right, and it has no side effects."""

from __future__ import annotations

import dataclasses

import torch

from engine_core.types import LossCall
from engine_plugin_testing.contracts import close, contract, identical, refused
from engine_plugin_testing.reference import logits_of, outputs_of, rows_of
from engine_plugin_testing.train_bench import NLL, POLICY, TrainBench


def _vocabulary(bench: TrainBench) -> int:
    """Return the model's vocabulary size: the width of the reference's logits."""
    with torch.no_grad():
        return logits_of(bench.reference(), torch.tensor([2, 3])).shape[-1]


def _expected(bench: TrainBench, temperature: float) -> None:
    engine, batch = bench.common_engine(), bench.batch(temperature=temperature)
    found = bench.infer(engine, batch)["log_probs"]
    with torch.no_grad():
        expected = outputs_of(bench.reference(), batch)["log_probs"]
    close(found, expected, bench.tolerance, f"log_probs at temperature {temperature}")


@contract(catches=("log-probs shifted by one token",))
def log_probs_equal_the_reference(bench: TrainBench) -> None:
    """``log_probs[t]`` is the log-probability of token t that an independent float64 forward pass gives."""
    _expected(bench, 1.0)


@contract(catches=("temperature ignored in training",))
def log_probs_are_at_the_temperature_of_the_batch(bench: TrainBench) -> None:
    """Log-probs come from ``softmax(logits / temperature)``, at temperatures above and below 1."""
    _expected(bench, 0.6)
    _expected(bench, 1.7)


@contract(capability="support", catches=("support ignored in training",))
def log_probs_are_over_the_support(bench: TrainBench) -> None:
    """With the column ``support_ids``, ``log_probs[t]`` is normalized over those tokens: ``log (p[token] / sum of p over them)``.

    A row of -1 means the whole vocabulary.
    """
    engine, batch = bench.common_engine(), bench.batch(temperature=0.8)
    vocabulary = _vocabulary(bench)
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(batch.num_tokens, vocabulary, generator=generator).argsort(-1)[:, :6].int()
    ids[:, 0] = batch.token_ids  # the token was drawn, so the support contains it
    again = (ids[:, 1:] == ids[:, :1]).any(-1)
    ids[:, 1:] = torch.where(again[:, None], -1, ids[:, 1:])
    ids[::3] = -1
    found = bench.infer(engine, batch.with_columns({"support_ids": ids}), ("log_probs",))["log_probs"]
    with torch.no_grad():
        rows = rows_of(bench.reference(), batch)
    kept = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, ids.clamp(min=0).long(), True)
    kept[:, 0] = (ids == 0).any(-1)  # where -1 was written as 0
    kept |= (ids < 0).all(-1)[:, None]
    over = rows.masked_fill(~kept, -torch.inf).logsumexp(-1)
    expected = rows.gather(-1, batch.token_ids[:, None]).squeeze(-1) - over
    mask = batch["loss_mask"]
    close(found[mask], expected[mask], bench.tolerance, "log_probs over support_ids")


@contract(catches=("entropy in bits",))
def entropy_equals_its_definition(bench: TrainBench) -> None:
    """``entropy[t]`` is ``-sum_v p_v log p_v`` for the distribution of token t at the temperature of the batch."""
    engine, batch = bench.common_engine(), bench.batch(temperature=0.8)
    found = bench.infer(engine, batch, ("log_probs", "entropy"))["entropy"]
    with torch.no_grad():
        expected = outputs_of(bench.reference(), batch)["entropy"]
    close(found, expected, 5 * bench.tolerance, "entropy")


@contract(
    catches=(
        "log-probs of the candidates of the next token",
        "the rest as 1 minus the sum",
    )
)
def log_probs_at_candidates_equal_the_reference(bench: TrainBench) -> None:
    """``log_probs_at[t]`` has the log-probs of the K tokens in ``candidate_ids[t]``.

    ``log_rest[t]`` is that of all other tokens together, even where the candidates have all but e^-30 of the probability.
    """
    engine, batch = bench.common_engine(), bench.batch(temperature=0.8)
    vocabulary = _vocabulary(bench)
    generator = torch.Generator().manual_seed(0)
    candidates = torch.rand(batch.num_tokens, vocabulary, generator=generator).argsort(-1)[:, :5]
    batch = batch.with_columns({"candidate_ids": candidates})
    found = bench.infer(engine, batch, ("log_probs_at", "log_rest"))
    mask = batch["loss_mask"]
    with torch.no_grad():
        rows = rows_of(bench.reference(), batch)
    close(found["log_probs_at"][mask], rows.gather(-1, candidates)[mask], bench.tolerance, "log_probs_at")
    others = rows.exp().scatter(-1, candidates, 0.0).sum(-1).log()
    close(found["log_rest"][mask], others[mask], bench.tolerance, "log_rest")
    batch = bench.batch()
    with torch.no_grad():
        likeliest = rows_of(bench.reference(), batch).topk(6)
    gap = likeliest.values[:, 0] - likeliest.values[:, -1]
    batch.temperature = min(
        1.0, float(gap[mask].median()) / 30
    )  # as a head that is 1 / temperature times as large
    with torch.no_grad():
        rows = rows_of(bench.reference(), batch)
    candidates = likeliest.indices[:, :5]
    others = rows.scatter(-1, candidates, -torch.inf).logsumexp(-1)
    batch = batch.with_columns({"candidate_ids": candidates})
    found = bench.infer(engine, batch, ("log_rest",))
    allowed = bench.tolerance / batch.temperature
    close(found["log_rest"][mask], others[mask], allowed, "log_rest of a sharp distribution")


@contract(catches=("the least likely tokens returned as the most likely",))
def top_tokens_are_the_likeliest(bench: TrainBench) -> None:
    """``top_ids[t]`` has the ``batch.top_k`` most likely tokens, the most likely first.

    They differ, and ``log_rest[t]`` is that of all other tokens.
    """
    engine, batch = bench.common_engine(), bench.batch(temperature=1.3)
    batch.top_k = 4
    found = bench.infer(engine, batch, ("top_ids", "top_log_probs", "top_log_rest"))
    mask = batch["loss_mask"]
    with torch.no_grad():
        rows = rows_of(bench.reference(), batch)
    ids, expected = found["top_ids"], rows.sort(-1, descending=True).values
    assert all(len(set(row)) == batch.top_k for row in ids[mask].tolist()), "top_ids names a token twice."
    close(found["top_log_probs"][mask], expected[mask][:, :4], bench.tolerance, "top_log_probs")
    close(rows.gather(-1, ids)[mask], expected[mask][:, :4], bench.tolerance, "log-probs of top_ids")
    close(
        found["top_log_rest"][mask],
        expected.exp()[:, 4:].sum(-1).log()[mask],
        bench.tolerance,
        "top_log_rest",
    )


@contract()
def outputs_of_the_whole_vocabulary_leave_no_rest(bench: TrainBench) -> None:
    """If K is the size of the vocabulary, no token is left over, and ``log_rest`` is -1e4 (a probability of 0).

    ``top_ids`` are then all tokens.
    """
    engine, batch = bench.common_engine(), bench.batch((4, 6))
    batch.top_k = _vocabulary(bench)
    found = bench.infer(engine, batch, ("top_ids", "top_log_probs", "top_log_rest"))
    mask = batch["loss_mask"]
    everything = torch.arange(batch.top_k).expand(int(mask.sum()), -1)
    assert torch.equal(found["top_ids"][mask].sort(-1).values, everything), "top_ids are not all tokens."
    close(
        found["top_log_probs"][mask].exp().sum(-1),
        torch.ones(int(mask.sum())),
        1e-3,
        "sums of all probabilities",
    )
    assert set(found["top_log_rest"][mask].tolist()) == {-1e4}, (
        "The rest of the whole vocabulary is not -1e4."
    )


@contract(catches=("attention across packed sequences",))
def a_sequence_does_not_see_its_neighbours(bench: TrainBench) -> None:
    """A sequence has the same log-probs whether it runs alone or packed with others."""
    engine, batch = bench.common_engine(), bench.batch()
    packed = bench.infer(engine, batch)["log_probs"].split(batch.lengths.tolist())
    for i in range(len(batch)):
        alone = bench.infer(engine, batch.select([i]))["log_probs"]
        close(packed[i], alone, bench.tolerance, f"log_probs of sequence {i} in a pack, against alone")


@contract(catches=("results in the order of the micro-batches",))
def results_come_in_the_order_of_the_batch(bench: TrainBench) -> None:
    """Results come in the order of the batch, no matter how the batch is cut into micro-batches.

    A batch in another order gives the same results in that order.
    """
    engine, batch = bench.common_engine(24), bench.batch()
    order = [3, 0, 7, 1, 5, 2, 6, 4]
    pieces = bench.infer(engine, batch)["log_probs"].split(batch.lengths.tolist())
    moved = bench.infer(engine, batch.select(order))["log_probs"]
    close(
        moved,
        torch.cat([pieces[i] for i in order]),
        bench.tolerance,
        "log_probs of the batch in another order",
    )


@contract(catches=("outputs at prompt tokens",))
def outputs_are_zero_where_nothing_is_learned(bench: TrainBench) -> None:
    """Outputs are exactly 0 everywhere except at loss tokens that have a token before them."""
    engine, batch = bench.common_engine(), bench.batch((5, 1, 9))
    batch.tokens["loss_mask"][:6] = True  # the first sequence whole, and a sequence of one token
    batch.tokens["loss_mask"][6:] = False
    found = bench.infer(engine, batch, ("log_probs", "entropy"))
    for name, value in found.items():
        nonzero = value.nonzero().flatten().tolist()
        assert nonzero == [1, 2, 3, 4], f"{name} is not 0 at {nonzero}; expected values at [1, 2, 3, 4] only."
    nothing = bench.infer(engine, batch.select([2]))["log_probs"]
    assert not nothing.any(), "A batch without loss tokens has outputs."


@contract(catches=("infer draws random numbers",))
def infer_leaves_no_trace(bench: TrainBench) -> None:
    """``infer`` changes no weight, no gradient and no random state.

    The step after it is the same as without it.
    """
    batch = bench.batch()
    quiet, asked = bench.engine(), bench.engine()
    before = bench.weights(asked)
    state = torch.get_rng_state()
    bench.infer(asked, batch, ("log_probs", "entropy"))
    assert torch.equal(torch.get_rng_state(), state), "infer draws from torch's generator."
    identical(bench.weights(asked), before, "weights after infer")
    bench.forward_backward(quiet, batch)
    bench.forward_backward(asked, batch)
    bench.infer(asked, batch, ("log_probs",))
    norms = [engine.optimizer_step().grad_norm for engine in (quiet, asked)]
    assert norms[0] == norms[1], (
        f"The gradient's norm with infer in between is {norms[1]}, without it {norms[0]}."
    )


@contract()
def an_unknown_output_is_refused(bench: TrainBench) -> None:
    """If a caller asks for an unknown output, the engine raises an error that names this output."""
    engine, batch = bench.common_engine(), bench.batch()
    with refused("infer of 'log_prob'", "log_prob"):
        engine.infer(bench.share(engine, batch)[1], ["log_prob"])


@contract(catches=("infer computes in another precision than the step",))
def the_ratio_of_an_unchanged_policy_is_exactly_one(bench: TrainBench) -> None:
    """For the same batch, ``infer`` and ``forward_backward`` give the same log-probs bit for bit.

    The batch has several micro-batches.
    """
    engine, batch = bench.engine(budget=24), bench.batch(temperature=0.9)
    old = bench.infer(engine, batch)["log_probs"]
    batch = batch.with_columns({"old_log_probs": old, "rollout_log_probs": old})
    metrics = bench.forward_backward(engine, batch, POLICY).metrics
    assert metrics["actor/clip_fraction"] == 0, f"actor/clip_fraction is {metrics['actor/clip_fraction']}."
    batch = batch.with_columns({"rollout_log_probs": old})
    batch.tokens.pop("old_log_probs")  # now the gap is measured against the training forward itself
    gap = bench.forward_backward(engine, batch, POLICY).metrics["max/mismatch/max_abs"]
    assert gap == 0, (
        f"The log-probs of infer and of forward_backward differ by up to {gap:.3g}; expected exactly 0."
    )


@contract()
def several_outputs_at_once_equal_each_alone(bench: TrainBench) -> None:
    """If a call also asks for ``entropy``, its log-probs stay the same."""
    engine, batch = bench.engine(), bench.batch()
    alone = bench.infer(engine, batch)["log_probs"]
    both = bench.infer(engine, batch, ("entropy", "log_probs"))["log_probs"]
    close(both, alone, bench.tolerance / 10, "log_probs with entropy")
    bench.forward_backward(engine, batch, NLL)


@contract(
    role="critic", catches=("values read from the token itself", "values that depend on packed sequences")
)
def values_see_only_the_tokens_before(bench: TrainBench) -> None:
    """A critic's ``values[t]`` depends only on tokens of the same sequence that come before t.

    It changes with token t - 1, and with no other sequence.
    """
    engine, batch = bench.engine(role="critic"), bench.batch((9, 14, 6))
    targets = {"returns": torch.linspace(-1, 1, batch.num_tokens), "values": torch.zeros(batch.num_tokens)}
    value = LossCall("value", {"value_clip": None}, outputs=("values",))
    bench.step(engine, batch.with_columns(targets), value)  # a new head may be all zeros
    before = bench.infer(engine, batch, ("values",))["values"]
    at, end = 9 + 4, 9 + 14  # a token of the second sequence
    ids = batch.token_ids.clone()
    ids[at] = 2 + (int(ids[at]) + 1) % 95
    after = bench.infer(engine, dataclasses.replace(batch, token_ids=ids), ("values",))["values"]
    reached = torch.zeros(batch.num_tokens, dtype=torch.bool)
    reached[at + 1 : end] = True
    close(after[~reached], before[~reached], bench.tolerance, f"values that token {at} must not reach")
    gap = float((after[at + 1] - before[at + 1]).abs())
    assert gap > 0, f"The value of token {at + 1} does not change with token {at}, the one before it."
