"""The train engine ``fsdp``: the reference engine with its model sharded over ranks.

It differs from ``TorchEngine`` in three ways. All ranks run the same number of micro-batches: every rank takes part in
every gather, so a rank with fewer micro-batches runs fillers that add nothing. Gradients are summed over ranks, by
default after the last micro-batch. Loss, metrics, norm and the decision to skip a step are those of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine_core.contracts.weight_names import own_weights
from engine_core.errors import ConfigError
from engine_core.model_config import load_hf_config
from engine_plugin_fsdp.budget import FSDPBudget
from engine_plugin_fsdp.build import INSTEAD, FSDPBuilder, allocate, broadcast, read_slices
from engine_plugin_fsdp.checkpoint import FSDPStore, gathered
from engine_plugin_fsdp.consistency import Probe, check_same
from engine_plugin_fsdp.fp8 import check_fp8, use_fp8
from engine_plugin_fsdp.options import FSDPOptions
from engine_plugin_fsdp.ranks import Ranks, mesh_shape
from engine_plugin_fsdp.sharding import (
    check,
    forget_forwards,
    offload_activations,
    shard,
    sharded_modules,
    step_on_parts,
    units_of,
)
from engine_plugin_fsdp.slices import SliceForward, SliceValueForward, check_heads, share_sequences
from engine_plugin_fsdp.start import check_distributed, check_types, tell, tell_of_no_units
from engine_plugin_fsdp.tensor_parallel import check_config, check_units, plan_of
from engine_plugin_torch.data_parallel import DataParallelEngine, Root
from engine_plugin_torch.folder_parts import check_folder, read_together
from engine_plugin_torch.sharded import copies, here
from engine_plugin_torch.skeleton import Skeleton
from engine_plugin_torch.units import checkpoint_units, compile_units
from engine_plugin_torch.value_models import VALUE_ROLES
from engine_plugin_torch.weights import published_weights, take_weights, to_own_names

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import Batch, LossCall, StepOutput, TrainOutput
    from engine_plugin_torch.packed_forward import PackedForward

log = logging.getLogger("engine")


class FSDPEngine(DataParallelEngine):
    """The train engine that shards with FSDP2. All methods except ``layout``, ``mark`` and ``set_...`` are collective.

    Attributes:
        root: the sharded wrapper of the module; forward passes run inside it.
        ranks: the meshes of the ranks, and reductions over them.
        skeleton: the model without weights.
        emulates_fp8: compute 8-bit products in float32, for tests on devices without them.
        began_backward: whether a call is in its backward passes, or has failed in them.
    """

    options: FSDPOptions  #: the role's option table
    ranks: Ranks
    builder: FSDPBuilder  #: reads the model and shards it
    store: FSDPStore  #: writes checkpoints and exports
    options_class = FSDPOptions
    builder_class = FSDPBuilder
    budget_class = FSDPBudget
    store_class = FSDPStore
    emulates_fp8 = False
    began_backward = False

    # -- building -----------------------------------------------------------

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> None:
        """Check the options as ``TorchEngine`` does, and that the number of ranks fits."""
        super().check(config, context, trainable=trainable)
        mesh_shape(cls._options(config), context.world_size, context.role)

    def _prepare(self) -> None:
        role = self.context.role
        check_types(f"{role}.fsdp", self.options, self.precision.compute, self.device)
        if self.options.fp8 is not None:
            self._check_fp8(self.options.fp8)
        if self.options.loading == "sharded":
            lora = self.config.lora is not None
            check_folder(self.model_config.path, role, lora, f"{role}.fsdp.loading", INSTEAD)
        if (
            self.config.lora is not None
            and self.options.cpu_offload == "params"
            and self.device.type != "cpu"
        ):
            raise ConfigError(
                f"{role}.fsdp.cpu_offload = 'params' cannot be combined with [{role}.lora]: the merged weights are computed "
                "on the device. A model below an adapter has no optimizer state: leave cpu_offload out."
            )
        given = self.config.path is None and (self.context.live or {}).get("model") is not None
        if not given and not self.context.plugins.overrides("engine_build_model"):
            _check_shared(self.options, self.model_config, role)
        self.ranks = Ranks(self.options, self.context, self.device)
        self._probe: Probe | None = None
        self.root: nn.Module | None = None
        self.skeleton: Skeleton | None = None
        self._found_units = False
        self._parameters: list[nn.Parameter] = []

    @classmethod
    def check_model(
        cls, config: RoleConfig, model_config: ModelConfig, role: str, processes: int | None
    ) -> None:
        """Refuse an adapter or a layout that does not fit the model or the number of processes."""
        options = cls._options(config)
        if processes is not None:
            mesh_shape(options, processes, role)
        _check_shared(options, model_config, role)
        super().check_model(config, model_config, role, processes)

    def _check_fp8(self, recipe: str) -> None:
        if self.config.lora is not None:
            raise ConfigError(
                f"{self._table}.fp8 cannot be combined with [{self.context.role}.lora]: the base is not trained, and "
                "an adapter's products are too small for 8 bits. Leave one out."
            )
        check_fp8(f"{self._table}.fp8", recipe, self.device, self.precision.compute, self.emulates_fp8)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """The type of the weights: FSDP casts gathered weights, so no autocast is used."""
        return self.precision.param

    def _adopt(self, built: Any) -> None:
        if self.options.loading == "sharded" and self.ranks.size > 1 and not self.builder.each_reads:
            raise ConfigError(
                f"{self._table}.loading = 'sharded': a plugin builds or shards this model, or it was given from Python, so "
                "every rank has the whole of it. Leave loading out."
            )
        super()._adopt(built)

    def _units(self, module: nn.Module) -> list[str]:
        self._found_units = True
        return units_of(module, self.options, self.context.role)

    def _shard(self, module: nn.Module, units: Sequence[str]) -> nn.Module:
        options = self.options
        check(module, units, self.context.role)
        if not units and self.ranks.size > 1 and options.sharding != "none":
            tell_of_no_units(module, self.context.role, refused=not self._found_units)
        check_same(
            module,
            self.ranks,
            values=not (self.builder.first_reads or self.builder.each_reads),
            role=self.context.role,
        )
        self.skeleton = Skeleton(module, self.device)
        role, tp = self.context.role, options.tp
        if not self.builder.each_reads and (options.fp8 is None or options.probe is True):
            self._probe = Probe(module.eval(), self.ranks, options, role)
        plan = None if tp == 1 else plan_of(module, tp, role)
        if plan is not None:
            check_units(module, plan, units, role)
        if options.fp8 is not None:  # not in the skeleton: samplers compute in the type of the forward pass
            use_fp8(module, options.fp8, f"{self._table}.fp8", self.emulates_fp8)
        if self.ranks.sequence is not None:
            share_sequences(module, self.ranks.sequence, role, tp)
        full = own_weights(module) if self.builder.first_reads and self.ranks.rank == 0 else {}
        if self._compiles:
            compile_units(module, units)
        if self.trainable:
            how = options.activation_checkpointing
            if how != "none":
                every = units[::how] if isinstance(how, int) else units
                checkpoint_units(module, every, lambda: bool(self.budget.recomputed_share))
            if options.activation_offload:
                offload_activations(module, units, pin=self.device.type != "cpu")
        self.root = shard(module, units, options, self.precision, self.ranks, plan)
        if self.builder.first_reads or self.builder.each_reads:
            allocate(self.root, torch.device("cpu") if options.cpu_offload == "params" else self.device)
        if self.builder.first_reads:
            broadcast(module, full, self.device)
        elif self.builder.each_reads:
            self._read_slices(module)
        tell(module, units, options, self.ranks, role, 0 if plan is None else len(plan.layers))
        return module

    def _read_slices(self, module: nn.Module) -> None:
        model, role = self.model_config, self.context.role
        read_together(lambda: read_slices(module, model, role), model.path, role, self.ranks)

    def _make_forward(self) -> PackedForward:
        if self.root is None:  # a plugin distributed the module already, or built its own optimizer
            self.root = Root(self.module)
            check_distributed(self.root, self.ranks, self.trainable, self.context.role)
        self._sharded = sharded_modules(self.root)
        if self.optimizer is not None:
            step_on_parts(self.optimizer)
        made = self._new_forward()
        made.one_scale = self.options.fp8 == "tensorwise"
        with torch.no_grad():
            self.root(made.settle)
        if isinstance(made, SliceForward | SliceValueForward):
            made.slice.check(made, self._table)
        if self._probe is not None:
            self.forward = made
            self._probe.compare(self._run, half=self.precision.compute.itemsize < 4)
        self._reshard()
        self.ranks.share_random_state()
        return made

    def _new_forward(self) -> PackedForward:
        if self.ranks.slice is None:
            return super()._make_forward()
        common: Any = (self.module, self.device, self._compute_dtype)
        if self.context.role in VALUE_ROLES:
            return SliceValueForward(*common, ranks=self.ranks)
        chunk, recompute = self.options.log_prob_chunk_tokens, self.options.log_prob_recompute
        return SliceForward(*common, chunk=chunk, recompute=recompute, ranks=self.ranks)

    # -- forward and backward -----------------------------------------------

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        """Compute outputs [T] or [T, K] without gradient, then free the gathered weights. Collective."""
        try:
            return super().infer(batch, outputs, adapter)
        finally:
            self._reshard()

    def _accumulate(self, batch: Batch, loss: LossCall) -> TrainOutput:
        self.began_backward = False
        output = super()._accumulate(batch, loss)
        self.began_backward = False
        return output

    def _backward(self, value: Tensor) -> None:
        self.began_backward = True
        self.loss_scale.scaled(value).backward()

    def _begin_micro_batch(self, last: bool) -> None:
        self._sync_gradients(self.options.gradient_sync == "each" or last)

    def _sync_gradients(self, wanted: bool) -> None:
        for part in self._sharded:
            part.set_requires_gradient_sync(wanted, recurse=False)

    def _reshard(self) -> None:
        """End forward passes that no backward pass follows."""
        for part in self._sharded:
            part.reshard()
            forget_forwards(part)

    # -- weights ------------------------------------------------------------

    def _published(self, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        if adapter:
            return gathered(self._adapted().tensors().items(), self._limit)
        return published_weights(self._plain, gathered(self._own(), self._limit))

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return gathered(own_weights(self.module).items(), self._limit)

    def _own(self) -> Iterable[tuple[str, Tensor]]:
        """Return the sharded weights of the model, with the adapter merged."""
        return own_weights(self.module).items() if self.adapter is None else self.adapter.merged()

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load whole tensors ``[D0, ...]``; every rank gets the whole stream and keeps its part. Collective."""
        self.store.need("weights")
        stream = to_own_names(self._plain, stream)
        if self.adapter is None:
            take_weights(self.module, stream, mix)
        else:
            self.adapter.take(stream, mix)
            self.adapter.base_identity()  # collective, so it is computed now and cached

    # -- optimizer ----------------------------------------------------------

    def optimizer_step(self) -> StepOutput:
        """Step on all ranks, and move offloaded optimizer state. Collective."""
        if self.options.cpu_offload != "none":
            self.store.move_optimizer(self.store.step_device)
        step = super().optimizer_step()
        if self.options.cpu_offload == "optimizer":
            self.store.move_optimizer(torch.device("cpu"))
        return step

    def _trainable_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters in the model's order; the list of all is cached (it takes a millisecond)."""
        if not self._parameters:
            self._parameters = list(self.module.parameters())
        return [p for p in self._parameters if p.requires_grad]

    def _grad_norm(self) -> Tensor:
        """Return the norm of the whole gradient; an element that several ranks hold counts once. Collective."""
        grads = self._grads()
        parts = [here(grad) for grad in grads]
        square = torch.zeros((), dtype=torch.float64)
        if parts:
            norms = torch.stack(torch._foreach_norm(parts, 2, torch.float32)).double()
            held = [copies(grad) if isinstance(grad, DTensor) else self.ranks.size for grad in grads]
            alike = len(set(held)) == 1
            square = (norms**2 / (held[0] if alike else torch.tensor(held).to(norms))).sum()
        return self.ranks.total(square).sqrt()

    def _clip(self, max_norm: float, norm: Tensor) -> None:
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        if factor < 1:
            torch._foreach_mul_([here(grad) for grad in self._grads()], factor)

    def close(self) -> None:
        """Wait for the store, release the model and leave the process group."""
        super().close()
        self.root, self.skeleton, self._sharded = None, None, []
        self._parameters = []
        self.ranks.close()


def _check_shared(options: FSDPOptions, model_config: ModelConfig, role: str) -> None:
    """Refuse, by the config, a model whose tokens (`sp`) or layers (`tp`) cannot be shared by ranks."""
    if options.tp > 1:
        check_config(load_hf_config(model_config), options.tp, role)
    if options.sp > 1:
        check_heads(load_hf_config(model_config), options.sp, options.tp, role)
