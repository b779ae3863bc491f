"""An engine in a random sequence of calls, and what a float64 reference expects of it after each call."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.contracts.engines import TrainEngine
from engine_core.errors import ConfigError, EngineError
from engine_core.types import LossCall
from engine_plugin_testing import reference, sequence_cases
from engine_plugin_testing.contracts import close, identical, near, same_direction
from engine_plugin_testing.optimizer_groups import HOOK, Groups
from engine_plugin_testing.probes import PROBE
from engine_plugin_testing.train_adapters import PREFIX, A, B, adapted, adapter_of
from engine_plugin_testing.train_bench import POLICY, check_plan, rounding
from engine_plugin_testing.train_runs import compare_moves

if TYPE_CHECKING:
    from random import Random

    from torch import Tensor, nn

    from engine_core.types import Batch, TrainOutput
    from engine_plugin_testing.train_bench import TrainBench

STEPS = 10  # of the run, for schedules
BUDGETS = (16, 40, 4096)
MOST = 65536  # tokens of a budget ``auto``


@dataclass
class Saved:
    """A state in a folder, and what it holds."""

    trained: bool
    folder: Path
    done: Future[None]
    weights: dict[str, Tensor]
    base: dict[str, Tensor]  # of an adapter
    steps: reference.ReferenceSteps
    random: Tensor


@dataclass
class Game:
    """A sequence: what its engines share."""

    bench: TrainBench
    seed: int
    draws: Random  # the same on every rank
    module: nn.Module  # the reference, filled with the weights of the engine whose turn it is
    saved: list[Saved] = field(default_factory=list)
    counts: dict[Any, int] = field(default_factory=dict)  # micro-batches by lengths and budget
    more: Random = field(init=False)  # of what was added later: further draws leave the sequences as they are
    last: Random = field(init=False)  # of what was added after that

    def __post_init__(self) -> None:
        self.more, self.last = random.Random(self.seed), random.Random(-1 - self.seed)


class Player:
    """An engine in a sequence, and what the reference expects of it.

    Args:
        game: the sequence.
        title: name of the engine in messages.
        shares: of the peak rate, one for each set of ``Groups``; empty: the engine's own optimizer.
        built: arguments of ``TrainBench.engine``.
    """

    def __init__(self, game: Game, title: str, shares: Sequence[float] = (), **built: Any) -> None:
        self.game, self.title, self.bench = game, title, game.bench
        self.draws, self.module = game.draws, game.module
        inner = self.module.module if isinstance(self.module, reference.ValueReference) else self.module
        self.fill = functools.partial(reference.fill, inner)
        self.role = "critic" if built.get("role") == "critic" else "actor"
        adam, random_state = self.bench.settings["optimizer"] == "adamw", torch.get_rng_state()
        self.groups = Groups(shares) if shares and adam and not self.bench.settings["gradients"] else None
        try:
            self.engine = game.bench.engine(total_steps=STEPS, groups=self.groups, **built)
        except ConfigError as error:
            if self.groups is None or HOOK not in str(error):
                raise
            self.groups = None  # the engine refuses the hook
            self.engine = game.bench.engine(total_steps=STEPS, **built)
        draws = self.role == "critic" or self.bench.load_plugins().overrides("engine_build_model")
        assert draws or torch.equal(torch.get_rng_state(), random_state), (
            f"Building the engine '{title}' changes torch's random state."
        )
        for name in ("infer", "forward_backward"):
            setattr(self.engine, name, _guarded(getattr(self.engine, name)))
        self.lora = self.engine.config.lora
        own = self.bench.reference(built.get("path")).state_dict() if self.lora else {}
        self.base = reference.as_published(inner, own)
        self.optim = {"max_grad_norm": 1.0, **built.get("optim", {})}
        self.peak: Any = self.optim.get("lr")
        self.steps = self._in_groups(reference.ReferenceSteps(self.optim, STEPS, adam))
        self.weights = self.trained()
        self.pending: dict[str, Tensor] = {}  # gradient since the last step
        self.marked: Tensor | None = None  # random state
        self.budget: int | str = 4096
        self._pads = torch.Generator().manual_seed(game.seed)  # padding among the tokens of a sequence

    def _in_groups(self, steps: reference.ReferenceSteps) -> reference.ReferenceSteps:
        """Give the weights of the reference's steps the rates of this engine."""
        if self.groups is not None:
            steps.share_of = self.groups.share_of
        return steps

    def trained(self) -> dict[str, Tensor]:
        """Return copies of the weights that are trained, [D_1, ...] by name: of an engine with an adapter, the adapter's."""
        return adapter_of(self.engine) if self.lora else self.bench.weights(self.engine)

    def whole(self) -> dict[str, Tensor]:
        """Return the weights that the whole model must have, [D_1, ...] by name."""
        scale = self.lora.alpha / self.lora.rank if self.lora else 0.0
        return adapted(self.base, self.weights, scale) if self.lora else self.weights

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        """Return the reference's gradient of a scalar loss, [D_1, ...] by the names of ``weights``."""
        found = reference.gradient_of(self.module, loss)
        if not self.lora:
            return found
        made = {}
        for name in self.weights:
            layer = name.removeprefix(PREFIX).removesuffix(A).removesuffix(B)
            a, b = (self.weights[f"{PREFIX}{layer}{half}"].double() for half in (A, B))
            whole = self.lora.alpha / self.lora.rank * found[f"{layer}.weight"]
            made[name] = b.T @ whole if name.endswith(A) else whole @ a.T
        return made

    def play(self, name: str) -> None:
        """Make a call, and check that it changed only what it should; what another engine changed shows here, too."""
        self.fill(self.whole())
        torch.manual_seed(self.draws.randrange(2**30) + self.bench.place.rank)
        before, weights = torch.get_rng_state(), self.weights
        loaded = getattr(self, name)()
        expected = before if loaded is None else loaded
        assert torch.equal(torch.get_rng_state(), expected), "The random state is not the expected one."
        if self.weights is weights or loaded is not None:  # not read yet
            identical(self.trained(), self.weights, "weights after the call", self.bench.exact)
        if self.lora:
            self._compare_whole()

    def _compare_whole(self) -> dict[str, Tensor]:
        """Compare and return the weights of the whole model, merged with an adapter."""
        expected, found = self.whole(), self.bench.weights(self.engine)
        for name, value in found.items():
            close(value, expected[name], 2 * rounding(value) if self.lora else 0.0, f"'{name}'")
        return found

    def _noise(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.draws.randrange(2**30))

    # -- calls without an effect --------------------------------------------------

    def infer(self) -> None:
        """Compare random outputs on a random batch; of an adapter's engine also without the adapter."""
        pool, draws = sequence_cases.POOLS[self.role], self.draws
        names = draws.sample(pool, draws.randint(1, len(pool)))
        batch = sequence_cases.random_batch(self.bench, draws, ("prompt", "all", "some", "none"))
        pads = torch.rand(batch.num_tokens, generator=self._pads) < 0.05
        batch = replace(batch, token_ids=batch.token_ids.masked_fill(pads, reference.PAD))
        top = "log_probs_at" not in names and self.role == "actor"
        support = not top and draws.random() < 0.3 and "support" in self.bench.capabilities
        batch = sequence_cases.with_columns_of(batch, draws, (), support)
        batch.top_k = draws.randint(1, 5) if top else 0
        off = {"adapter": False} if self.lora and draws.random() < 0.3 else {}
        self.fill(self.base if off else self.whole())
        tops = ("top_ids", "top_log_probs", "top_log_rest") if top else ()
        found = self.bench.infer(self.engine, batch, (*names, *tops), **off)
        with torch.no_grad():
            expected = sequence_cases.expected_outputs(self.module, batch, names)
            if top:
                expected |= sequence_cases.expected_top(self.module, batch)
                chosen = batch.with_columns({"candidate_ids": found["top_ids"]})
                found |= sequence_cases.expected_outputs(self.module, chosen, ("log_probs_at",))
                expected["log_probs_at"] = expected["top_log_probs"]
        for name, values in expected.items():
            close(found[name], values, 10 * self.bench.tolerance, f"{name} {off or ''}")
        self.fill(self.whole())

    def read(self) -> None:
        """Read ``named_weights`` twice, and export."""
        first = self._compare_whole()
        identical(self.bench.weights(self.engine), first, "weights that are read again")
        folder = self.bench.folder / f"export-{self.game.seed}-{self.title}"
        self.engine.export(folder)
        self.bench.barrier()
        identical(reference.published(folder), first, "exported weights")
        if self.role == "actor" and "generation_module" in self.bench.capabilities:
            self._lend()

    def _lend(self) -> None:
        """Lend the module to a borrower that fails, and compare the log-probs of the next one."""
        with contextlib.suppress(KeyError), self.engine.generation_module():
            raise KeyError("an error of the borrower")
        ids = self.bench.batch((19,), seed=self.game.seed).token_ids
        self.fill(self.whole())
        with self.engine.generation_module() as module:
            found = reference.logits_of(module, ids.to(next(module.parameters()).device)).float().cpu()
        with torch.no_grad():
            expected = torch.log_softmax(reference.logits_of(self.module, ids), -1)
        found = torch.log_softmax(found, -1).gather(1, ids.roll(-1)[:, None])
        close(found, expected.gather(1, ids.roll(-1)[:, None]), 10 * self.bench.tolerance, "a lent module")

    def sleep(self) -> None:
        """Sleep with random parts kept, perhaps deeper after that, and wake; gradients of a step that has begun are kept."""
        if "sleep" not in self.bench.capabilities:
            return
        parts = [part for part in ("weights", "optimizer", "gradients") if self.draws.random() < 0.25]
        kept = {*parts, "gradients"} if self.pending else {*parts}
        self.engine.sleep(keep=sorted(kept))
        if self.game.last.random() < 0.5:
            self.engine.sleep(keep=("gradients",) if self.pending else ())
        if self.draws.random() < 0.5:
            self.engine.wake(only=("weights",))
            self.infer()
        self.engine.wake()
        if self.game.last.random() < 0.5:
            self.engine.wake()

    def set_token_budget(self) -> None:
        """Set a random token budget, which may be ``auto``."""
        budget = self.draws.choice(BUDGETS)
        self.budget = "auto" if budget == max(BUDGETS) and self.game.more.random() < 0.5 else budget
        self.engine.set_token_budget(self.budget)

    def mark(self) -> None:
        """Mark the random state, if the engine can, twice."""
        if type(self.engine).mark is not TrainEngine.mark:
            self.marked = torch.get_rng_state()
            torch.rand(3)
            self.engine.mark()
            torch.set_rng_state(self.marked)
            self.engine.mark()

    def save(self) -> None:
        """Save, and wait for it now or before a ``load``."""
        folder = self.bench.folder / f"state-{self.game.seed}-{len(self.game.saved)}"
        done = self.engine.save(folder)
        if self.draws.random() < 0.5:
            done.result()
        random = torch.get_rng_state() if self.marked is None else self.marked
        steps = copy.deepcopy(self.steps)
        trained = self.engine.trainable
        self.game.saved.append(Saved(trained, folder, done, self.weights, self.base, steps, random))

    # -- calls that change the engine -----------------------------------------------

    def load(self) -> Tensor | None:
        """Load a state, perhaps an old one or that of another engine; return the random state [S] that it must bring back.

        Raises:
            EngineError: a state over the engine's own base is refused.
        """
        states = [saved for saved in self.game.saved if saved.trained == self.engine.trainable]
        if not states:
            self.save()
            return None
        self._end()
        chosen = self.draws.choice(states)
        for saved in states:
            saved.done.result()
        self.bench.barrier()
        fits = all(torch.equal(value, chosen.base[name]) for name, value in self.base.items())
        try:
            self.engine.load(chosen.folder)
        except EngineError:
            if fits:
                raise
            return None  # refused over another base: nothing has changed
        self.weights, self.marked = chosen.weights, None
        self.base, self.steps = chosen.base, self._in_groups(copy.deepcopy(chosen.steps))
        self.steps.optim = self.optim
        if self.optim.get("lr") != self.peak:  # now it is the run file's
            self.engine.set_lr(self.optim["lr"])
        self.infer()
        return chosen.random

    def mix(self) -> None:
        """Load new weights, or mix in a share of them."""
        self._end()
        share, noise, before = self.draws.choice((0.25, 1.0)), self._noise(), self.weights
        share = share if share == 1 else self.game.more.choice((0.25, 0.6, 0.9))
        new = {n: v + 0.05 * torch.randn(v.shape, generator=noise).to(v.dtype) for n, v in before.items()}
        names = self.draws.sample(sorted(new), len(new))
        kind = self.game.more.choice(("float", "half", "strided"))
        if kind == "half":
            new = {name: value.bfloat16() for name, value in new.items()}
        elif kind == "strided":
            new = {name: value.mT.contiguous().mT if value.ndim > 1 else value for name, value in new.items()}
        self.engine.load_named_weights(((name, new[name]) for name in names), mix=share)
        self.weights = self.trained()
        for name, value in self.weights.items():
            mixed = (1 - share) * before[name].double() + share * new[name].double()
            close(value, mixed, 2 * rounding(value), f"'{name}' with mix={share} of a {kind} tensor")
        self.infer()

    def new_base(self) -> None:
        """Load a whole model into the engine of an adapter, which then adds nothing."""
        self._end()
        noise = self._noise()
        new = {n: v + 0.05 * torch.randn(v.shape, generator=noise) for n, v in self.whole().items()}
        merged = self.bench.weights(self.engine)
        new = {name: new[name].to(value.dtype) for name, value in merged.items()}
        self.engine.load_named_weights(iter(new.items()))
        self.base = {name: value.double() for name, value in new.items()}
        self.weights = self.trained()
        identical(self._compare_whole(), new, "a whole model that an adapter's engine has loaded")

    def set_lr(self) -> None:
        """Replace the peak learning rate."""
        if "set_lr" in self.bench.capabilities:
            self.optim["lr"] = self.peak * self.draws.choice((0.5, 1.0, 2.0))
            if self.groups is not None:
                self.engine.set_lr(0.0)  # which has no shares
            self.engine.set_lr(self.optim["lr"])

    def losses(self) -> None:
        """Add the gradients of several random losses of the role's own objective, with random token budgets."""
        for _ in range(8):
            self.set_token_budget()
            self.backward("value" if self.role == "critic" else "policy")

    def backward(self, *kinds: str) -> None:
        """Add the gradient of a random loss, and compare loss, metrics and the number of micro-batches."""
        case = sequence_cases.random_case(self.bench, self.draws, self.module, self.role, *kinds)
        gradient = self.gradient(case.loss)
        size = self.draws.choice((0.2, 0.6, 1.5)) / max(reference.norm_of(gradient), 1e-6)
        case = case.multiplied(size)
        found = self.bench.forward_backward(self.engine, case.batch, case.call)
        for name, value in gradient.items():
            self.pending[name] = self.pending.get(name, 0.0) + size * value
        what = f"of {case.call.name} {case.call.parameters or case.call.outputs}"
        close(torch.tensor(found.loss), case.loss, case.bound(self.bench.tolerance), f"loss {what}")
        for name, metric in case.metrics.items():
            near(found.metrics[name], metric, max(1e-4, 50 * self.bench.tolerance), f"metric {name} {what}")
        for name, mean in case.means.items():
            allowed = max(1e-4, 50 * self.bench.tolerance) * (1 + abs(mean))
            assert name in found.metrics, f"There is no metric {name} {what}."
            assert abs(found.metrics[name] - mean) <= allowed, (
                f"metric {name} {what}: {found.metrics[name]:.6g}, expected {mean:.6g}."
            )
        self._compare_plan(case.batch, found)

    def _compare_plan(self, batch: Batch, found: TrainOutput) -> None:
        """Compare the number of micro-batches with that of an equal plan before, and check what they hold."""
        check_plan(found, MOST if self.budget == "auto" else int(self.budget))
        if self.budget == "auto" and self.bench.device.type == "cpu":  # documented there: 8192
            assert found.num_micro_batches <= 1, (
                f"A batch of {batch.num_tokens} tokens has {found.num_micro_batches} micro-batches with a budget 'auto' on the CPU."
            )
        ids = batch.keep_together
        together = None if ids is None else tuple(ids.tolist())
        plan = (tuple(batch.lengths.tolist()), self.budget, together)
        count = self.game.counts.setdefault(plan, found.num_micro_batches)
        assert count == found.num_micro_batches, (
            f"Sequences of {plan[0]} tokens with a budget of {plan[1]}: {found.num_micro_batches} micro-batches, "
            f"before {count}."
        )

    def scale(self) -> None:
        """Scale the gradients of a step that has begun, in two factors, and add another one, which is not scaled."""
        if "late_scale" in self.bench.capabilities and self.pending:
            factor = self.draws.choice((0.5, 2.0))
            for part in (0.25, 4 * factor):
                self.engine.scale_gradients(part)
            self.pending = {name: factor * value for name, value in self.pending.items()}
            self.draws, own = self.game.last, self.draws
            self.backward()
            self.draws = own

    def skip(self) -> None:
        """Add a loss that is not finite, perhaps scale the gradients, and take a step, which is skipped."""
        case = sequence_cases.random_case(self.bench, self.draws, self.module, self.role, PROBE)
        column = case.batch[case.scales[0]].clone()
        column[sequence_cases.learned(case.batch).nonzero()[-1]] = math.inf
        self.bench.forward_backward(
            self.engine, *self._infinite(case.batch.with_columns({case.scales[0]: column}), case.call)
        )
        if "late_scale" in self.bench.capabilities and self.draws.random() < 0.5:
            self.engine.scale_gradients(2.0)
        step, self.pending = self.engine.optimizer_step(), {}
        assert step.skipped, f"The step is not reported as skipped: {step}."
        if not self.bench.settings["gradients"]:
            rate = reference.rate_of(self.optim, self.steps.done, STEPS)
            near(step.lr, rate, 1e-5, "lr of a skipped step")

    def _infinite(self, batch: Batch, call: LossCall) -> tuple[Batch, LossCall]:
        """Return a batch and a loss that is not finite: as given, or a KL of infinity, whose gradient is finite."""
        if self.role == "critic" or self.game.more.random() < 0.5:
            return batch, call
        reference_ = torch.zeros(batch.num_tokens)
        reference_[sequence_cases.learned(batch).nonzero()[-1]] = -math.inf
        weights = batch["loss_mask"].float()
        options = {**POLICY.parameters, "kl_coef": 1.0, "kl_estimator": "k1"}
        return batch.with_columns({"ref_log_probs": reference_, "weights": weights}), LossCall(
            "policy", options
        )

    def step(self) -> None:
        """Take a step, and compare norm, rate and moves, or the gradient where the suite reads it."""
        if not self.pending:
            self.backward()
        gradient, self.pending, before = self.pending, {}, self.weights
        step, self.weights = self.engine.optimizer_step(), self.trained()
        expected, slopes, rate, norm = self.steps.step(before, gradient)
        assert not step.skipped, f"The step is skipped: {step}."
        near(step.grad_norm, norm, self.bench.gradient_tolerance, "grad_norm")
        if self.bench.settings["gradients"]:
            found = self.bench.gradient(self.engine, before)
            same_direction(found, gradient, self.bench.gradient_tolerance, "gradient")
            return
        near(step.lr, rate, 1e-5, "lr")
        compare_moves(self.bench, (before, self.weights, expected), gradient, slopes, rate, "the step")

    def _end(self) -> None:
        """End a step that has begun."""
        if self.pending:
            self.step()


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that fails if it changes the batch or the loss that it gets."""

    @functools.wraps(method)
    def call(batch: Batch, *arguments: Any, **options: Any) -> Any:
        """Call the method, and compare the batch."""
        before = {**_content(batch), "arguments": repr(arguments)}
        found = method(batch, *arguments, **options)
        after = {**_content(batch), "arguments": repr(arguments)}
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        assert not changed, f"What the call gets is changed: {changed}."
        return found

    return call


def _content(batch: Batch) -> dict[str, Any]:
    """Return all that a batch holds as values that can be compared, NaN too."""
    tensors = {**batch.tokens, **batch.sequences, "token_ids": batch.token_ids, "lengths": batch.lengths}
    values = {name: (value.dtype, value.shape, value.numpy().tobytes()) for name, value in tensors.items()}
    if batch.keep_together is not None:
        values["keep_together"] = tuple(batch.keep_together.tolist())
    return {**values, "temperature": batch.temperature, "top_k": batch.top_k}
