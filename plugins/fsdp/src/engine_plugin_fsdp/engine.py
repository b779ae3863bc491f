"""The train engine ``fsdp``: the reference engine with its model spread over ranks.

What differs from ``TorchEngine``: ranks run the same number of micro-batches (those that have fewer run
some that add nothing, since every rank takes part in every gather), gradients are summed over ranks after
the last one, and loss, metrics, norm and the decision to skip a step are those of all ranks. What is kept
and given away is in ``keeping``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine_core.engines.log_probs import zero_outputs
from engine_core.engines.model_loading import cast_parameters
from engine_core.engines.sharded import copies, here
from engine_core.engines.units import compile_units
from engine_core.engines.value_models import VALUE_ROLES
from engine_core.engines.weights import own_weights
from engine_core.errors import ConfigError, DataError
from engine_core.packing import plan_micro_batches
from engine_core.types import Batch, TrainOutput
from engine_plugin_fsdp.dtypes import check_dtype
from engine_plugin_fsdp.keeping import Keeping
from engine_plugin_fsdp.loading import allocate, blank_model, broadcast
from engine_plugin_fsdp.loss_scale import LossScale
from engine_plugin_fsdp.options import FSDPOptions
from engine_plugin_fsdp.ranks import Ranks
from engine_plugin_fsdp.recompute import offload_activations, recompute
from engine_plugin_fsdp.sequence import SequenceForward, share_sequences
from engine_plugin_fsdp.sharding import Root, check, shard, sharded_modules, units_of
from engine_plugin_fsdp.skeleton import Skeleton
from engine_plugin_fsdp.start import check_distributed, check_same, tell

if TYPE_CHECKING:
    from engine_core.config import ModelConfig
    from engine_core.engines.base import Layout
    from engine_core.engines.packed_forward import PackedForward
    from engine_core.types import StepOutput

log = logging.getLogger("engine")


class FSDPEngine(Keeping):
    """See ``TrainEngine``; every method but ``layout``, ``mark`` and ``set_...`` is collective.

    Attributes:
        root: holds the module and, sharded, is what a forward pass goes through.
        ranks: meshes, and sums over ranks.
        skeleton: the model without weights.
    """

    options: FSDPOptions
    options_class = FSDPOptions

    # -- building -----------------------------------------------------------

    def _choose_device(self) -> torch.device:
        device = super()._choose_device()
        if device.type == "cpu":
            return device
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)
        return torch.device(device.type, torch.accelerator.current_device_index())

    def _prepare(self) -> None:
        role = self.context.role
        check_dtype(f"{role}.fsdp.mixed_precision.param_dtype", self.precision.compute, self.device)
        if (
            self.config.lora is not None
            and self.options.cpu_offload == "params"
            and self.device.type != "cpu"
        ):
            raise ConfigError(
                f"{role}.fsdp.cpu_offload = 'params' cannot be combined with [{role}.lora]: the merged weights are computed "
                "on the device. A model below an adapter has no optimizer state: leave cpu_offload out."
            )
        self.ranks = Ranks(self.options, self.context, self.device)
        self.root: nn.Module | None = None
        self.skeleton: Skeleton | None = None
        self._first_reads = False
        fp16 = self.precision.compute == torch.float16 and self.trainable
        self.loss_scale = LossScale(self.options.loss_scale) if fp16 else None

    @property
    def layout(self) -> Layout:
        return self.ranks.layout

    @property
    def _compute_dtype(self) -> torch.dtype:
        """FSDP casts gathered weights, so there is no autocast beside it."""
        return self.precision.param

    @property
    def _load_device(self) -> torch.device:
        return torch.device("cpu")

    def _load(self, model: ModelConfig, live: nn.Module | None) -> nn.Module:
        """Read by the first rank alone; one that is given from Python, or built or sharded by a plugin, is on every rank."""
        own = live is not None or self.context.plugins.overrides("engine_shard_model")
        self._first_reads = not own and self.ranks.size > 1 and self.options.loading != "every_rank"
        if not self._first_reads:
            return super()._load(model, live)
        module, error = None, None
        try:
            if self.ranks.rank == 0:
                module = super()._load(model, live)
            else:
                module = blank_model(model, self.context.role, self._param_dtype)
        except Exception as problem:
            error = problem
        self.ranks.share(error, f"Building the model of '{model.path}'", DataError)
        assert module is not None
        return module

    def _place(self, module: nn.Module) -> nn.Module:
        # On the CPU still: unit by unit goes to the device when it is sharded.
        return cast_parameters(module, self._param_dtype)

    def _units(self, module: nn.Module) -> list[str]:
        return units_of(module, self.options, self.context.role)

    def _shard(self, module: nn.Module, units: Sequence[str]) -> nn.Module:
        options = self.options
        check(module, units, self.context.role)
        check_same(module, self.ranks, values=not self._first_reads, role=self.context.role)
        self.skeleton = Skeleton(module, self.device)
        if self.ranks.sequence is not None:
            share_sequences(module, self.ranks.sequence, self.model_config.attention, self.context.role)
        recomputed: list[str] = []
        if self._compiles:
            compile_units(module, units)
        if self.trainable:
            recomputed = recompute(module, units, options.activation_checkpointing)
            if options.activation_offload:
                offload_activations(module, units, pin=self.device.type != "cpu")
        full = own_weights(module) if self._first_reads and self.ranks.rank == 0 else {}
        self.root = shard(module, units, options, self.precision, self.ranks)
        if self._first_reads:
            allocate(self.root, torch.device("cpu") if options.cpu_offload == "params" else self.device)
            broadcast(module, full, self.device)
        tell(module, units, recomputed, options, self.ranks, self.context.role)
        return module

    def _make_forward(self) -> PackedForward:
        if self.root is None:  # a plugin brought a module that is distributed already, or its own optimizer
            self.root = Root(self.module)
            check_distributed(self.root, self.ranks, self.trainable, self.context.role)
        self._sharded = sharded_modules(self.root)
        made = self._new_forward()
        with torch.no_grad():
            self.root(made.settle)
        self._reshard()
        return made

    def _new_forward(self) -> PackedForward:
        if self.ranks.sequence is None:
            return super()._make_forward()
        chunk, recompute = self.options.log_prob_chunk_tokens, self.options.log_prob_recompute
        settings: dict[str, Any] = {"chunk": chunk, "recompute": recompute, "group": self.ranks.sequence}
        return SequenceForward(self.module, self.device, self._compute_dtype, **settings)

    # -- forward and backward -----------------------------------------------

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        try:
            return super().infer(batch, outputs, adapter)
        finally:
            self._reshard()

    def _halve_budget(self, batch: Batch, error: Exception) -> bool:
        """A second try is for a rank that is alone: the others would not know of it."""
        return self.ranks.size == 1 and super()._halve_budget(batch, error)

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """As many as the rank that needs most; those beyond this rank's own are two tokens that nothing is learned from."""
        together = None if batch.keep_together is None else batch.keep_together.tolist()
        lengths, budget = batch.lengths.tolist(), self.config.max_tokens_per_rank
        plan = plan_micro_batches(lengths, budget, together)
        plan = plan_micro_batches(lengths, budget, together, count=self.ranks.most(len(plan)))
        for number, indices in enumerate(plan):
            self._sync_gradients(self.options.gradient_sync == "each" or number == len(plan) - 1)
            micro = batch.select(indices) if indices else filler(batch)
            yield indices, micro.to(self.device)

    def _outputs(self, micro: Batch, grad: Sequence[str], watched: Sequence[str] = ()) -> dict[str, Tensor]:
        """Every rank runs the model, also where nothing is learned: every weight is gathered and has a gradient."""
        assert self.root is not None
        if self._learns(micro):
            return self._run(micro, grad, watched)
        found = self._run(filler(micro, learned=True), (self.forward.outputs[0],))
        nothing = 0.0 * torch.stack([value.sum() for value in found.values()]).sum()
        zeros = zero_outputs((*grad, *watched), micro, self.device)
        return {n: v + nothing if v.is_floating_point() else v for n, v in zeros.items()}

    def _run(self, micro: Batch, grad: Sequence[str], watched: Sequence[str] = ()) -> dict[str, Tensor]:
        """The forward pass inside of the root's. A model that takes one sequence at a time takes as many on all ranks."""
        assert self.root is not None
        if self.forward.packs:
            return self.root(functools.partial(self.forward, micro, grad, watched))
        count = int((micro.lengths > 0).sum())
        padded = _with_single_tokens(micro, self.ranks.most(count) - count)
        found = self.root(functools.partial(self.forward, padded, grad, watched))
        return {name: value[: micro.num_tokens] for name, value in found.items()}

    def _learns(self, micro: Batch) -> bool:
        """Whether a forward pass goes through the head: a token is learned that has one before it."""
        mask = micro["loss_mask"].clone()
        if self.context.role not in VALUE_ROLES:
            mask[micro.offsets[:-1][micro.lengths > 0]] = False
        return bool(mask.any())

    def _backward(self, value: Tensor) -> None:
        value = value if self.loss_scale is None else value * self.loss_scale.factor
        value.backward()

    def _sync_gradients(self, wanted: bool) -> None:
        for part in self._sharded:
            part.set_requires_gradient_sync(wanted, recurse=False)

    def _reshard(self) -> None:
        for part in self._sharded:
            part.reshard()

    def _over_ranks(self, output: TrainOutput) -> TrainOutput:
        """Sums and maxima over the data-parallel ranks; a rank without sequences has no metrics of its own."""
        mine = (
            [output.loss, *(output.metrics[n] for n in sorted(output.metrics))]
            if self.layout.is_leader
            else []
        )
        told = self.ranks.texts({"names": sorted(output.metrics)})
        names = sorted({name for one in told for name in one["names"]})
        largest = [name for name in names if name.startswith("max/")]
        summed = [name for name in names if not name.startswith("max/")]
        held = output.metrics if mine else {}
        total = self.ranks.total(
            torch.tensor(
                [output.loss if mine else 0.0, *(held.get(n, 0.0) for n in summed)], dtype=torch.float64
            )
        ).tolist()
        metrics = dict(zip(summed, total[1:], strict=True))
        if largest:
            low = -torch.finfo(torch.float64).max
            most = torch.tensor([held.get(name, low) for name in largest], dtype=torch.float64)
            metrics |= dict(zip(largest, self.ranks.largest(most).tolist(), strict=True))
        return TrainOutput(total[0], metrics, output.num_micro_batches)

    # -- optimizer ----------------------------------------------------------

    def optimizer_step(self) -> StepOutput:
        self._move_optimizer(self._step_device)
        step = super().optimizer_step()
        if self.options.cpu_offload == "optimizer":
            self._move_optimizer(torch.device("cpu"))
        if self.loss_scale is not None:
            self.loss_scale.stepped(step.skipped)
        return step

    def _grad_norm(self) -> Tensor:
        """The norm of the whole gradient: each element counts once, however many ranks hold it."""
        grads = self._grads()
        parts = [here(grad) for grad in grads]
        if self.loss_scale is not None and parts:
            torch._foreach_div_(parts, self.loss_scale.factor)
        square = torch.zeros((), dtype=torch.float64)
        if parts:
            norms = torch.stack(torch._foreach_norm(parts, 2, torch.float32)).double().cpu()
            held = [copies(grad) if isinstance(grad, DTensor) else self.ranks.size for grad in grads]
            square = (norms**2 / torch.tensor(held, dtype=torch.float64)).sum()
        return self.ranks.total(square).sqrt()

    def _clip(self, max_norm: float, norm: Tensor) -> None:
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        if factor < 1:
            torch._foreach_mul_([here(grad) for grad in self._grads()], factor)

    def close(self) -> None:
        super().close()
        self.root, self.skeleton, self._sharded = None, None, []
        self.ranks.close()


def filler(like: Batch, learned: bool = False) -> Batch:
    """One sequence of two tokens with the columns of a batch, all 0.

    Args:
        learned: the second is a loss token, so that the head is used.
    """
    tokens = {name: column.new_zeros(2, *column.shape[1:]) for name, column in like.tokens.items()}
    tokens["loss_mask"] = torch.tensor([False, learned], device=like.token_ids.device)
    return dataclasses.replace(
        like,
        token_ids=like.token_ids.new_zeros(2),
        lengths=like.lengths.new_full((1,), 2),
        tokens=tokens,
        sequences={name: column.new_zeros(1, *column.shape[1:]) for name, column in like.sequences.items()},
        keep_together=None if like.keep_together is None else like.keep_together.new_zeros(1),
    )


def _with_single_tokens(micro: Batch, count: int) -> Batch:
    """A batch with ``count`` sequences of one token behind its own, from which nothing is learned."""
    if not count:
        return micro
    tokens = {
        name: torch.cat([column, column.new_zeros(count, *column.shape[1:])])
        for name, column in micro.tokens.items()
    }
    return dataclasses.replace(
        micro,
        token_ids=torch.cat([micro.token_ids, micro.token_ids.new_zeros(count)]),
        lengths=torch.cat([micro.lengths, micro.lengths.new_ones(count)]),
        tokens=tokens,
        sequences={},
        keep_together=None,
    )
