"""Contracts of sizes, of uneven shares of the ranks, and of metrics over micro-batches, ranks and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import LossCall
from engine_plugin_testing.contracts import close, contract, near, same_direction
from engine_plugin_testing.probes import PAIRS, PROBE, probed
from engine_plugin_testing.reference import fill, gradient_of, nll_loss, norm_of, outputs_of, probe_outputs
from engine_plugin_testing.train_bench import LENGTHS, MEASURE, NLL, ODD, POLICY, TrainBench, check_plan
from engine_plugin_testing.train_steps import OPTIONS

if TYPE_CHECKING:
    from engine_core.contracts.engines import TrainEngine
    from engine_core.types import Batch

LONG = (
    120,
    97,
    64,
    33,
    81,
    *(5, 3, 4) * 12,
)  # 539 tokens: more than one chunk, window or block of most kernels
MANY = (3, 1, 4, 2, 5) * 24  # 360 tokens in 120 sequences, of which 48 have no loss token
CALLS = ((ODD, 4096), (LENGTHS, 12), (ODD, 12), (LENGTHS, 4096))  # lengths and token budgets
OFFSET = 3.0  # of the values of a metric: the sum over tokens cancels nothing


@contract(
    catches=(
        "attention limited to a window",
        "the last row of a chunk dropped",
        "a sequence cut to a maximum length",
    )
)
def long_packs_equal_the_reference(bench: TrainBench) -> None:
    """A pack of 539 tokens in 41 sequences has the reference's outputs and gradient.

    The longest sequence has 120 tokens. The same holds in micro-batches.
    """
    batch = bench.batch(LONG, seed=2)
    module = bench.reference()
    expected = gradient_of(module, nll_loss(module, batch))
    with torch.no_grad():
        outputs = outputs_of(module, batch)
    for budget in (4096, 200):
        engine = bench.common_engine(budget)
        for name, values in bench.infer(engine, batch, ("log_probs", "entropy")).items():
            close(values, outputs[name], 5 * bench.tolerance, f"{name} with {budget} tokens a micro-batch")
        found, _, _ = bench.measured(batch, budget=budget)
        what = f"gradient with {budget} tokens a micro-batch"
        same_direction(found, expected, bench.gradient_tolerance, what)


@contract(
    catches=(
        "gradients added up in half precision",
        "sequences beyond the hundredth dropped",
        "micro-batches beyond the sixteenth dropped",
    )
)
def many_sequences_equal_the_reference(bench: TrainBench) -> None:
    """120 short sequences have the reference's outputs in one pack, and its gradient over many micro-batches.

    Sequences of one or two tokens have no loss token.
    """
    batch = bench.batch(MANY, seed=7)
    module = bench.reference()
    outputs = outputs_of(module, batch)
    expected = gradient_of(module, -(batch["weights"] * outputs["log_probs"]).sum())
    for name, values in bench.infer(bench.common_engine(), batch, ("log_probs", "entropy")).items():
        close(values, outputs[name].detach(), 5 * bench.tolerance, f"{name} of 120 sequences")
    found, _, _ = bench.measured(batch, budget=20)
    same_direction(found, expected, bench.gradient_tolerance, "gradient of 120 sequences")


@contract(
    catches=(
        "metrics of the last micro-batch",
        "metrics averaged over micro-batches",
        "maxima summed over ranks or micro-batches",
        "negative maxima reported as 0",
        "maxima of one rank only",
        "a rank without sequences that clears its gradient",
        "the mean of each rank's sequences",
    )
)
def uneven_shares_are_those_of_the_whole(bench: TrainBench) -> None:
    """If ranks get uneven shares, loss, metrics, norm and gradient are still those of the whole batch.

    Cases: an odd number of sequences, unequal numbers of micro-batches, and ranks without sequences or loss tokens.
    """
    module = bench.reference()
    odd = probed(bench.batch(ODD, seed=3), "log_probs")
    odd["loss_mask"][-12:-8] = False
    single = probed(bench.batch((14,), seed=4), "log_probs")
    silent = probed(bench.batch((8, 11, 6), seed=5), "log_probs")
    silent["loss_mask"][8:19] = False  # the second sequence: of another rank
    engine = bench.engine(optim=MEASURE, budget=16)
    before, total = bench.weights(engine), torch.zeros((), dtype=torch.float64)
    results = []
    for what, batch in (("odd", odd), ("single", single), ("partly masked", silent)):
        batch.tokens.pop("support_ids")
        mask = batch["loss_mask"]
        batch.tokens["token_share"] = mask / mask.sum()
        batch.tokens["probe/log_probs"] /= 10
        loss = (batch["probe/log_probs"] * outputs_of(module, batch)["log_probs"]).sum()
        total = total + loss
        results.append(
            (what, batch, float(loss.detach()), bench.forward_backward(engine, batch, LossCall(PROBE)))
        )
    step = engine.optimizer_step()
    for what, batch, expected, found in results:  # now: no rank waits for one that has failed
        mask, bound = batch["loss_mask"], 5 * bench.tolerance * float(batch["probe/log_probs"].abs().sum())
        close(torch.tensor(found.loss), torch.tensor(expected), bound, f"loss of the {what} batch")
        values = batch["probe/metric"][mask].double()
        most = float(values.max())
        metrics = {"kit/mean": float(values.mean()), "kit/count": float(mask.sum())}
        for name, value in {**metrics, "max/kit/high": most, "max/kit/low": most - 100}.items():
            assert name in found.metrics, f"The {what} batch has no metric '{name}'."
            near(found.metrics[name], value, 1e-4, f"metric '{name}' of the {what} batch")
    gradient = gradient_of(module, total)
    near(step.grad_norm, norm_of(gradient), bench.gradient_tolerance, "grad_norm of uneven shares")
    if min(value.dtype.itemsize for value in before.values()) == 4:  # else too coarse to show a gradient
        found_ = bench.gradient(engine, before)
        same_direction(found_, gradient, bench.gradient_tolerance, "gradient of uneven shares")


@contract(
    catches=(
        "outputs of a dummy token from a rank without sequences",
        "outputs padded to the longest share",
        "sequences without loss tokens left out",
        "outputs in the order of the groups",
    )
)
def infer_over_uneven_shares_is_that_of_the_whole(bench: TrainBench) -> None:
    """If ranks get uneven shares, ``infer`` still gives the outputs of the whole batch, in its order.

    Cases: an odd number of sequences, ranks without sequences or loss tokens, and groups of ``keep_together``.
    """
    module, engine = bench.reference(), bench.common_engine(16)
    silent, groups = bench.batch((8, 11, 6, 3), seed=5), bench.batch((9, 8, 5, 7, 6), seed=6)
    silent["loss_mask"][8:19] = False  # the second sequence: of another rank
    groups.keep_together = torch.tensor([1, 0, 1, 2, 0])
    cases = {"an odd": bench.batch(ODD, seed=3), "a single": bench.batch((14,), seed=4)}
    outputs = ("log_probs", "entropy", "log_probs_at")
    for what, batch in {**cases, "a partly masked": silent, "a grouped": groups}.items():
        batch = probed(batch)
        batch.tokens.pop("support_ids")
        with torch.no_grad():
            expected = probe_outputs(module, batch, outputs)
        for name, values in bench.infer(engine, batch, outputs).items():
            close(values, expected[name], 5 * bench.tolerance, f"{name} of {what} batch")


@contract(
    catches=(
        "sequences that belong together split",
        "neighboring groups merged into one",
        "a group packed by its longest sequence",
    )
)
def sequences_that_belong_together_are_not_split(bench: TrainBench) -> None:
    """A loss over groups of ``keep_together`` has the same value and gradient with any token budget.

    A micro-batch of several groups has no more tokens than the budget.
    """
    batch = bench.batch((9, 8, 5, 7, 6, 8, 4), seed=6)
    groups = batch.keep_together = torch.tensor([0, 1, 0, 1, 2, 3, 3])
    batch = batch.with_columns({}, {"sign": torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0])})
    module = bench.reference()
    log_probs = outputs_of(module, batch)["log_probs"]
    sums = batch["sign"] * batch.sum_by_sequence(batch["weights"].double() * log_probs)
    loss = (torch.zeros(4).double().index_add(0, groups, sums) ** 2).sum()
    expected = norm_of(gradient_of(module, loss))
    engine = bench.engine(optim={"lr": 0.0}, budget=10)
    found = bench.forward_backward(engine, batch, LossCall(PAIRS))
    near(found.loss, float(loss.detach()), 20 * bench.tolerance, "loss of groups")
    near(
        engine.optimizer_step().grad_norm,
        expected,
        2 * bench.gradient_tolerance,
        "norm of the loss of groups",
    )
    for budget in (16, 22, 28, 36):
        engine.set_token_budget(budget)
        found = bench.forward_backward(engine, batch, LossCall(PAIRS))
        near(
            found.loss,
            float(loss.detach()),
            20 * bench.tolerance,
            f"loss of groups with a budget of {budget}",
        )
        check_plan(found, budget)


@contract(
    catches=(
        "metrics added up over calls",
        "the loss added up over calls",
        "metrics of the first call again",
        "metrics in half precision",
    )
)
def every_call_reports_its_own_loss_and_metrics(bench: TrainBench) -> None:
    """Each call of ``forward_backward`` reports loss and metrics of that call's batch only, to five digits.

    There are two calls for each step, in one micro-batch or several.
    """
    module, engine = bench.reference(), bench.engine(optim={"lr": 0.05})
    for number, (lengths, budget) in enumerate(CALLS):
        if number % 2 == 0:
            fill(module, bench.weights(engine))
        batch = probed(bench.batch(lengths, seed=number), "log_probs")
        batch.tokens.pop("support_ids")
        batch.tokens["probe/log_probs"] /= 10
        batch.tokens["probe/metric"] += OFFSET + number
        engine.set_token_budget(budget)
        found = bench.forward_backward(engine, batch, LossCall(PROBE))
        with torch.no_grad():
            loss = (batch["probe/log_probs"] * outputs_of(module, batch)["log_probs"]).sum()
        what = f"call {number + 1} in micro-batches of at most {budget} tokens"
        bound = 5 * bench.tolerance * float(batch["probe/log_probs"].abs().sum())
        close(torch.tensor(found.loss), loss, bound, f"loss of {what}")
        mask, values = batch["loss_mask"], batch["probe/metric"].double()
        metrics = {"kit/mean": float(values[mask].mean()), "max/kit/high": float(values[mask].max())}
        for name, value in metrics.items():
            near(found.metrics[name], value, 1e-5, f"metric '{name}' of {what}")
        if number % 2:
            engine.optimizer_step()


@contract(
    catches=(
        "the options of the first loss kept",
        "the temperature of the first batch kept",
        "positions up to the longest sequence of the first batch",
        "a loss of a batch without sequences that is not 0",
    )
)
def a_batch_does_not_depend_on_those_before(bench: TrainBench) -> None:
    """An engine that has seen other batches gives the same outputs, loss, metrics and norm as a new engine.

    The batches differ in lengths, temperature, candidates and options of the loss. One of them has no sequence.
    """
    short, long = bench.batch((5, 4, 7, 6)), bench.batch((40, 3, 90, 17, 8), seed=1, temperature=0.6)
    draws = torch.Generator().manual_seed(3)
    cases: list[tuple[Batch, LossCall]] = []
    for batch, call in (
        (short, POLICY),
        (long, LossCall("policy", OPTIONS, outputs=("log_probs", "entropy"))),
    ):
        columns = {
            name: -3 - torch.rand(batch.num_tokens, generator=draws)
            for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
        }
        width = 2 + len(cases)
        ids = torch.arange(2, 2 + width).expand(batch.num_tokens, width).clone()
        cases.append((batch.with_columns({**columns, "candidate_ids": ids}), call))
    new = [_seen(bench, bench.engine(optim={"lr": 0.0}), *case) for case in cases]
    used = bench.engine(optim={"lr": 0.0})
    for number in (0, 1, 0):
        empty = cases[number][0].select([])
        found = used.infer(empty, ["log_probs"])["log_probs"]
        assert found.shape == (0,), (
            f"log_probs of a batch without sequences have the shape {list(found.shape)}."
        )
        loss = used.forward_backward(empty, NLL).loss
        assert loss == 0, f"The loss of a batch without sequences is {loss}."
        for what, value in _seen(bench, used, *cases[number]).items():
            expected = new[number][what]
            about = f"{what} of batch {number + 1} after another one"
            if isinstance(value, float):
                near(value, expected, max(1e-4, bench.norm_tolerance), about)
            else:
                close(value, expected, bench.tolerance, about)


def _seen(bench: TrainBench, engine: TrainEngine, batch: Batch, call: LossCall) -> dict[str, Any]:
    """Return outputs [T] and [T, K], loss, metrics and norm of one batch by name."""
    found: dict[str, Any] = dict(bench.infer(engine, batch, ("log_probs", "entropy", "log_probs_at")))
    trained = bench.forward_backward(engine, batch, call)
    norm = engine.optimizer_step().grad_norm
    return {**found, "loss": trained.loss, "grad_norm": norm, **trained.metrics}
