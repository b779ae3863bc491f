"""The bench of train engines: builds them, splits a batch over data-parallel ranks, gathers results.

Contracts are written once for any number of ranks: every rank holds the whole batch, gives its engine its share of the
sequences, and compares with values computed from the whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine_core.config import ModelConfig, OptimConfig, RoleConfig
from engine_core.contracts.engines import WorkerContext
from engine_core.types import Batch, LossCall
from engine_plugin_testing.bench import EngineBench
from engine_plugin_testing.probes import coefficients, offer
from engine_plugin_testing.reference import DecoderScores, ValueReference, fill
from engine_plugin_testing.worker import resolve

if TYPE_CHECKING:
    from engine_core.config.roles import LoRAConfig
    from engine_core.contracts.engines import TrainEngine
    from engine_core.types import StepOutput, TrainOutput
    from engine_plugin_testing.optimizer_groups import Groups
    from engine_plugin_testing.worker import Place

NLL = LossCall("nll")
POLICY = LossCall("policy", {"loss": "ppo_clip", "loss_options": {}})
LENGTHS = (7, 23, 1, 12, 5, 12, 2, 9)
ODD = (9, 31, 4, 7, 12)  # an odd number of sequences
PROMPT = 2  # tokens of each sequence before its loss tokens

MEASURE = {"lr": 1.0, "eps": 1.0, "betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": 0.0}
"""AdamW whose first step reveals the gradient: ``w0 - w1 = lr g / (|g| + eps)``; so does SGD with ``lr`` 1."""


_COMMON: dict[str, TrainEngine] = {}  # by settings; of one suite at a time


class TrainBench(EngineBench):
    """A bench that builds train engines and compares them with a reference."""

    kind = "train_engines"

    def __init__(self, settings: Mapping[str, Any], place: Place) -> None:
        super().__init__(settings, place)
        self._given: dict[TrainEngine, dict[str, Tensor]] = {}  # the last gradients, by the suite's function

    @property
    def tolerance(self) -> float:
        """The largest difference of a log-prob, in nats."""
        return float(self.settings["tolerance"])

    @property
    def gradient_tolerance(self) -> float:
        """The largest difference of a gradient, as a share of its norm."""
        return float(self.settings["gradient_tolerance"])

    @property
    def norm_tolerance(self) -> float:
        """The largest difference of a gradient's norm, as a share of it."""
        return float(self.settings["norm_tolerance"])

    @property
    def precision(self) -> float:
        """The share of a gradient's size within which rounding moves it: tighter than ``gradient_tolerance`` in float32."""
        return min(self.gradient_tolerance, 100 * self.norm_tolerance)

    @property
    def exact(self) -> bool:
        """Whether a resumed run must continue bit for bit."""
        return bool(self.settings["bit_exact"])

    def engine(self, **changes: Any) -> TrainEngine:
        """Build an engine as ``_built`` describes, which is closed after the contract."""
        made = self._built(**changes)
        self.stack.callback(made.close)
        return made

    def unkept_engine(self) -> TrainEngine:
        """Build an engine that the contract closes, and to which the bench keeps no reference."""
        made = self._built()
        made.__dict__.pop("optimizer_step", None)  # of a suite with ``gradients``
        return made

    def common_engine(self, budget: int = 4096) -> TrainEngine:
        """Return an engine on the tiny model for contracts that call ``infer`` alone: they share it.

        Args:
            budget: tokens of a micro-batch, set in each call.
        """
        values = {name: value for name, value in self.settings.items() if name != "shared"}
        key = json.dumps([values, str(self.place.cache)], sort_keys=True, default=str)
        if key not in _COMMON:
            for engine in _COMMON.values():
                engine.close()
            _COMMON.clear()
            _COMMON[key] = self._built()
        _COMMON[key].set_token_budget(budget)
        return _COMMON[key]

    def _built(
        self,
        *,
        path: str | None = None,
        budget: int = 4096,
        optim: Mapping[str, Any] | None = None,
        trainable: bool = True,
        role: str = "actor",
        total_steps: int = 10,
        lora: LoRAConfig | None = None,
        override: Mapping[str, Any] | None = None,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        live: nn.Module | None = None,
        groups: Groups | None = None,
    ) -> TrainEngine:
        """Build an engine on the tiny model (or ``path``), with an ``override`` of its config and `model.seed`.

        ``options`` are added to the suite's; ``live`` is a model given from Python; ``groups`` build the optimizer.
        """
        plugins = self.load_plugins(fresh=groups is not None, losses="ppo_clip")
        offer(plugins)
        if groups is not None:
            groups.add_to(plugins)
        config = RoleConfig(
            backend=self.name,
            max_tokens_per_rank=budget,
            optim=OptimConfig(**{"lr": 1e-2, **(optim or {})}),
            lora=lora,
            options=self.checked_options(plugins, options),
        )
        context = WorkerContext(
            plugins=plugins,
            role=role,
            device=self.device,
            rank=self.place.rank,
            world_size=self.place.world_size,
            total_steps=total_steps,
            live=None if live is None else {"model": live},
        )
        made: TrainEngine = plugins.resolve(self.kind, self.name)(
            config,
            ModelConfig(path=path or self.model(), override=dict(override or {}), seed=seed),
            context,
            trainable=trainable,
        )
        if trainable and self.settings["gradients"]:
            self._record_gradients(made)
        return made

    def _record_gradients(self, engine: TrainEngine) -> None:
        """Read the gradients by the suite's function before each optimizer step of an engine; see ``gradient``."""
        read, step = resolve(self.settings["gradients"], self.root), engine.optimizer_step

        def recorded() -> StepOutput:
            self._given[engine] = {n: value.detach().to("cpu", copy=True) for n, value in read(engine)}
            return step()

        engine.optimizer_step = recorded  # type: ignore[method-assign]

    def reference(self, path: str | None = None, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Load the reference module of ``path``, with ``weights`` [D_1, D_2, ...] of ``named_weights`` if given."""
        module: nn.Module = self.load_reference(path or self.model())
        if weights is not None:
            fill(module, weights)
        return module

    def value_reference(
        self, weights: Mapping[str, Tensor], path: str | None = None
    ) -> ValueReference | None:
        """Return the reference of a critic or reward model with ``weights`` [D_1, D_2, ...] of ``named_weights``.

        ``path`` is the folder of the model. None: the suite has its own ``reference`` and declares none of a critic.
        """
        own = self.settings["value_reference"]
        if self.settings["reference"] and not own:
            return None
        path = path or self.model()
        module = resolve(own, self.root)(path) if own else DecoderScores(self.reference(path), weights)
        fill(module, weights)
        return ValueReference(module)

    @property
    def root(self) -> Path:
        """The folder of the test's file."""
        return Path(self.settings["root"])

    def other_models(self) -> list[str]:
        """Return folders of models that differ from ``model``: untied, with other vectors. Collective.

        Norm weights are not 1 and biases not 0. The first model is of the family under test. The second has the
        changes of the suite's ``second_model``: biases, dropout and a sliding window.
        """
        second = self.settings["second_model"]
        own = self.settings["write_model"] or "model_type" in self.settings["model"]
        shapes: list[Mapping[str, Any]] = [{}, second] if second and not own else [{}]
        return [self._with_other_vectors(self.model(seed=2, tied=False, **changes)) for changes in shapes]

    def _with_other_vectors(self, folder: str) -> str:
        made = Path(f"{folder}-vectors")
        if self.place.rank == 0 and not made.exists():
            shutil.copytree(folder, made)
            noise = torch.Generator().manual_seed(5)
            for file in sorted(made.glob("*.safetensors")):
                weights = load_file(file)
                for name in sorted(weights):
                    if weights[name].ndim == 1:
                        weights[name] += 0.3 * torch.randn(weights[name].shape, generator=noise)
                save_file(weights, file, metadata={"format": "pt"})
        self.barrier()
        return str(made)

    # -- batches ------------------------------------------------------------

    def batch(self, lengths: Sequence[int] = LENGTHS, seed: int = 0, temperature: float = 1.0) -> Batch:
        """Make a batch of random tokens whose weights differ from token to token and are 0 outside of the loss mask."""
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)
        mask = torch.cat([torch.arange(n) >= PROMPT for n in lengths])
        weights = (0.5 + torch.rand(total, generator=generator)) * mask / mask.sum().clamp(min=1)
        advantages = torch.randn(len(lengths), generator=generator)
        return Batch(
            token_ids=torch.randint(2, 97, (total,), generator=generator),
            lengths=torch.tensor(lengths),
            tokens={
                "loss_mask": mask,
                "weights": weights,
                "token_share": mask.float() / mask.sum().clamp(min=1),
                "advantages": torch.repeat_interleave(advantages, torch.tensor(lengths)),
                "rollout_log_probs": torch.zeros(total),
            },
            temperature=temperature,
        )

    def share(self, engine: TrainEngine, batch: Batch) -> tuple[list[int], Batch]:
        """Return this rank's data-parallel slice, every ``dp_size``-th sequence or group: their indices and their batch.

        A single slice is the batch itself: an engine gets the same object again if a contract passes it again.
        """
        layout, groups = engine.layout, batch.keep_together
        numbers = range(len(batch)) if groups is None else groups.tolist()
        indices = [i for i, number in enumerate(numbers) if number % layout.dp_size == layout.dp_rank]
        return indices, batch if layout.dp_size == 1 else batch.select(indices)

    def infer(
        self,
        engine: TrainEngine,
        batch: Batch,
        outputs: Sequence[str] = ("log_probs",),
        **adapter: bool,
    ) -> dict[str, Tensor]:
        """Run ``infer`` on all ranks and return the outputs of the whole batch on every rank; ``adapter=False`` is passed on.

        Returns:
            By output: [T], or [T, K] for outputs with K values a token.
        """
        indices, share = self.share(engine, batch)
        found = engine.infer(share, outputs, **adapter)
        offsets = batch.offsets.tolist()
        places = [torch.arange(offsets[i], offsets[i + 1]) for i in indices]
        index = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
        problem = next(filter(None, (_problem_of(name, found[name], share) for name in outputs)), "")
        problems = torch.tensor(float(bool(problem)))
        self.sum_over_ranks(problems)  # no rank waits for one that has failed
        assert not problem, problem
        assert not problems, "infer gave a wrong shape, type or device on another rank."
        whole = {}
        for name in outputs:
            width, kind = _shape_of(name, batch)
            whole[name] = torch.zeros(batch.num_tokens, *width, dtype=kind)
            if engine.layout.is_leader:
                whole[name][index] = found[name]
            self.sum_over_ranks(whole[name])
        return whole

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Sum a CPU tensor [D_1, D_2, ...] over ranks, in place; each rank sets the values of other ranks to 0."""
        if self.place.world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    def forward_backward(self, engine: TrainEngine, batch: Batch, loss: LossCall = NLL) -> TrainOutput:
        """Run ``forward_backward`` on all ranks, each with its share."""
        return engine.forward_backward(self.share(engine, batch)[1], loss)

    def step(self, engine: TrainEngine, batch: Batch, loss: LossCall = NLL) -> StepOutput:
        """Take one optimizer step on the whole batch."""
        self.forward_backward(engine, batch, loss)
        return engine.optimizer_step()

    # -- weights ------------------------------------------------------------

    def weights(self, engine: TrainEngine) -> dict[str, Tensor]:
        """Return copies of the weights [D_1, D_2, ...] by name on the CPU; fail if a name comes twice."""
        found: dict[str, Tensor] = {}
        for name, value in engine.named_weights():
            assert name not in found, f"named_weights gives '{name}' twice."
            assert not value.requires_grad, f"named_weights gives '{name}' with a gradient."
            found[name] = value.detach().to("cpu", copy=True)
        return found

    def gradient(self, engine: TrainEngine, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of ``MEASURE``'s first step, from the weights ``before`` it and the current ones.

        A suite with ``gradients`` has read it before the step.

        Args:
            engine: engine after the step.
            before: weights [D_1, D_2, ...] by name before the step; the gradients have the same names and shapes.
        """
        if engine in self._given:
            return self._given[engine]
        found = {}
        for name, after in self.weights(engine).items():
            change = before[name].double() - after.double()
            adam = self.settings["optimizer"] == "adamw"
            found[name] = change / (1 - change.abs()).clamp(min=1e-6) if adam else change
        return found

    def measured(
        self,
        batch: Batch,
        loss: LossCall = NLL,
        *,
        budget: int = 4096,
        optim: Mapping[str, Any] | None = None,
        path: str | None = None,
        later_budget: int = 0,
        scaled: bool = False,
    ) -> tuple[dict[str, Tensor], TrainOutput, StepOutput]:
        """Return the gradients [D_1, D_2, ...] by name, the loss and the step of a new engine on one batch.

        Weights narrower than float32 are too coarse to show a small gradient. It is then read off a second step, whose
        token weights are larger.
        """
        engine = self.engine(budget=budget, optim={**MEASURE, **(optim or {})}, path=path)
        if later_budget:
            engine.set_token_budget(later_budget)
        before = self.weights(engine)
        trained = self.forward_backward(engine, batch, loss)
        step = engine.optimizer_step()
        found = self.gradient(engine, before)
        if (
            not scaled
            and engine not in self._given
            and min(value.dtype.itemsize for value in before.values()) < 4
        ):
            factor = 1 / max(float(value.abs().max()) for value in found.values())
            more = {**(optim or {})}
            more["max_grad_norm"] = factor * more.get("max_grad_norm", 0.0)
            scales = [name for name in batch.tokens if name == "weights" or name in coefficients(loss)]
            larger = batch.with_columns({name: factor * batch[name] for name in scales})
            again = self.measured(
                larger, loss, budget=budget, optim=more, path=path, later_budget=later_budget, scaled=True
            )[0]
            found = {name: value / factor for name, value in again.items()}
        return found, trained, step


def check_plan(found: TrainOutput, budget: int) -> None:
    """Assert that no micro-batch of several groups exceeds the token budget, and that no group is split.

    Args:
        found: the result of a call whose loss has the metrics of ``probes.plan_metrics``; of another loss, nothing is checked.
        budget: most tokens of a micro-batch.
    """
    tokens, apart = (found.metrics.get(f"max/kit/{name}", 0.0) for name in ("tokens", "apart"))
    assert tokens <= budget, (
        f"A micro-batch of several sequences or groups has {tokens:g} tokens; the budget is {budget}."
    )
    assert not apart, f"A micro-batch lacks {apart:g} sequences of a group of keep_together."


def rounding(weight: Tensor) -> float:
    """Return how far a weight [D_1, D_2, ...] may be off where it is rounded to its own type; at least 1e-6."""
    return max(1e-6, torch.finfo(weight.dtype).eps * float(weight.abs().max()))


def _problem_of(output: str, value: Tensor, batch: Batch) -> str:
    """Return what is wrong with the shape, type or device of an output's value for a batch; "" if nothing is."""
    width, kind = _shape_of(output, batch)
    if value.shape != (batch.num_tokens, *width):
        return f"infer gave '{output}' of shape {list(value.shape)}; expected {[batch.num_tokens, *width]}."
    if value.requires_grad:
        return f"infer gave '{output}' with a gradient."
    if (value.dtype, value.device.type) != (kind, "cpu"):
        return f"infer gave '{output}' as {value.dtype} on {value.device}; expected {kind} on the CPU."
    return ""


def _shape_of(output: str, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape of an output's value for one token, and its type."""
    if output == "log_probs_at":
        return tuple(batch["candidate_ids"].shape[1:]), torch.float32
    width = (batch.top_k,) if output in ("top_ids", "top_log_probs") else ()
    return width, torch.int64 if output == "top_ids" else torch.float32
