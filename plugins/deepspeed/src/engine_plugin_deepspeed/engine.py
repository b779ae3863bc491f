"""The train engine ``deepspeed``: the reference engine with its model under DeepSpeed's ZeRO.

DeepSpeed places weights, gradients and optimizer state, reduces gradients, computes their norm, clips them and takes
the optimizer step. The engine does everything else: micro-batches, losses, schedules, checkpoints. Not used:
DeepSpeed's launcher, pipelines, schedulers, checkpoints (they are pickles), and AutoTP (see ``docs/deepspeed.md``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.errors import ConfigError
from engine_core.types import StepOutput
from engine_plugin_deepspeed import library
from engine_plugin_deepspeed.budget import DeepSpeedBudget
from engine_plugin_deepspeed.build import INSTEAD, DeepSpeedBuilder, shapes_shown
from engine_plugin_deepspeed.checkpoint import DeepSpeedStore
from engine_plugin_deepspeed.library import settings
from engine_plugin_deepspeed.options import DeepSpeedOptions
from engine_plugin_deepspeed.partitions import AdapterInParts, Partitions, release
from engine_plugin_torch.checkpoint import PARTS
from engine_plugin_torch.data_parallel import DataParallelEngine, Root
from engine_plugin_torch.folder_parts import check_folder
from engine_plugin_torch.loss_scale import LossScale
from engine_plugin_torch.precision import check_mixed, choose, find_device
from engine_plugin_torch.rank_group import RankGroup
from engine_plugin_torch.skeleton import Skeleton
from engine_plugin_torch.weights import published_weights, take_weights, to_own_names

if TYPE_CHECKING:
    from engine_core.config import RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_plugin_torch.packed_forward import PackedForward

log = logging.getLogger("engine")


class DeepSpeedEngine(DataParallelEngine):
    """A ``TrainEngine`` under DeepSpeed ZeRO. Every method but ``layout``, ``mark`` and ``set_...`` is collective.

    Attributes:
        ranks: the group of ranks, for reductions.
        zero: DeepSpeed's engine; None where the role is not trained and each rank holds the whole model.
        partitions: weights and optimizer state as DeepSpeed stores them.
        skeleton: the model without weights.
    """

    options: DeepSpeedOptions
    partitions: Partitions
    adapter: AdapterInParts | None
    zero: Any
    builder: DeepSpeedBuilder
    store: DeepSpeedStore
    options_class = DeepSpeedOptions
    builder_class = DeepSpeedBuilder
    budget_class = DeepSpeedBudget
    store_class = DeepSpeedStore

    # -- building -----------------------------------------------------------

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> None:
        """Also refuse a type that DeepSpeed lacks on this device, or into which the run cannot mix weights."""
        super().check(config, context, trainable=trainable)
        options, table = cls._options(config), f"{context.role}.{config.backend}"
        library.check_type(options, context.device, table)
        if options.stage == 3:  # a role that is not trained has its weights in the compute type alone
            compute = choose(options, find_device(options.device, context.device, table), table).compute
            check_mixed(context, compute, f"{table}.compute_dtype")

    def _prepare(self) -> None:
        self.root, self.zero, self.skeleton = None, None, None
        if self.options.loading == "sharded":
            path, lora = self.model_config.path, self.config.lora is not None
            check_folder(path, self.context.role, lora, f"{self._table}.loading", INSTEAD)
        self.ranks = RankGroup(self.context.rank, self.context.world_size, self.device)
        self._members: list[list[str]] = []
        self.loss_scale = LossScale()  # DeepSpeed scales the loss
        library.join(library.load(self.device, self._table))

    @property
    def _under_zero(self) -> bool:
        """Whether DeepSpeed manages this role: a frozen role is partitioned only at stage 3."""
        return self.trainable or self.options.stage == 3

    def _adopt(self, built: Any) -> None:
        if self.options.loading == "sharded" and self.builder.blank is None:
            raise ConfigError(
                f"{self._table}.loading = 'sharded': a plugin builds this model, or it was given from Python, so every rank "
                "has the whole of it. Leave loading out."
            )
        super()._adopt(built)

    @property
    def _kept_dtype(self) -> torch.dtype:
        """The type of the weights in the forward pass."""
        return self.precision.compute if self.options.stage else self.precision.param

    @property
    def _zero_config(self) -> dict[str, Any]:
        norm = self.config.optim.max_grad_norm if self.trainable else 0.0
        return settings(self.options, self.precision.compute, self.device, norm)

    def _shard(self, module: nn.Module, units: Sequence[str]) -> nn.Module:
        if self.adapter is not None:
            self.adapter.base_identity()  # hash the base model while it is whole
        self.skeleton = Skeleton(module if self.builder.blank is None else self.builder.blank, self.device)
        return super()._shard(module, units)

    def _finish(self, module: nn.Module) -> None:
        with shapes_shown(module):
            super()._finish(module)

    def _make_forward(self) -> PackedForward:
        """Hand the module to DeepSpeed, after the engine has built everything else around it."""
        if self._under_zero:
            self._start()
        else:
            self.root = Root(self.module)
        wrapped = None if self.zero is None or self.options.stage == 0 else self.zero.optimizer
        kept = wrapped if self.trainable else None
        self.partitions = Partitions(self.module, kept, self.optimizer)
        if (scaler := self.store.loss_scaler) is not None:
            scaler.raise_error_at_min_scale = False  # `max_skipped_steps` ends the run
        if self.adapter is not None:
            self.adapter = AdapterInParts(self.adapter, self.partitions, self._limit)
        made = super()._make_forward()
        with torch.no_grad():
            assert self.root is not None
            self.root(made.settle)
        return made

    def _start(self) -> None:
        """Give the module, and the optimizer if there is one, to DeepSpeed."""
        deepspeed = library.load(self.device, self._table)
        self._members = self._names_of_groups()
        self.zero, *_ = deepspeed.initialize(
            model=Root(self.module), optimizer=self.optimizer, config=self._zero_config
        )
        self.root = functools.partial(with_one_gradient, self.zero)
        if self.options.stage == 0:
            self.zero.set_gradient_accumulation_boundary(False)

    def _names_of_groups(self) -> list[list[str]]:
        """Return the weights' names of each optimizer group, before DeepSpeed replaces weights by its flat parts."""
        if self.optimizer is None:
            return []
        names = {id(p): name for name, p in self.module.named_parameters()}
        return [
            [names[id(p)] for p in group["params"]]
            for group in self.optimizer.param_groups
            if group["params"]
        ]

    # -- forward and backward -----------------------------------------------

    def _backward(self, value: Tensor) -> None:
        """Run the backward pass of the loss times the ranks: the loss is a sum, and DeepSpeed averages gradients."""
        self.zero.backward(value * self.ranks.size, scale_wrt_gas=False)

    # -- weights ------------------------------------------------------------

    @property
    def _spread(self) -> bool:
        return super()._spread and self.partitions.spread

    def _published(self, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights to publish, in their compute type; an adapter alone in the optimizer's float32."""
        if adapter:
            return iter(self._adapted().tensors().items())
        own = self._whole_weights() if self.adapter is None else self.adapter.merged()
        return published_weights(self._plain, own)

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.partitions.weights(self._limit)

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load whole weights (``[OUT, IN]`` of a linear layer); each rank reads the whole stream and keeps its part."""
        self.store.need("weights")
        stream = to_own_names(self._plain, stream)
        if self.adapter is None:
            take_weights(self.module, stream, mix, self.partitions.places())
        else:
            self.adapter.take(stream, mix)
            self.adapter.base_identity()  # collective, so computed here, where all ranks take part

    # -- optimizer ----------------------------------------------------------

    def optimizer_step(self) -> StepOutput:
        """Take the step in DeepSpeed; at stage 0 reduce gradients and step as the reference engine does."""
        self.store.need(*PARTS)
        self._trained()
        if self.options.stage == 0:
            self.zero.set_gradient_accumulation_boundary(True)
            self.zero.allreduce_gradients()
            self.zero.set_gradient_accumulation_boundary(False)
            return super().optimizer_step()
        lr, scaler = self.lr, self.store.loss_scaler
        scale = None if scaler is None else scaler.cur_scale
        self.zero.step()
        skipped = bool(self.zero.optimizer.overflow)
        if not skipped and self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.num_skipped_steps += skipped
        finite, self.loss_scale.loss_is_finite = self.loss_scale.loss_is_finite, True
        rescaled = finite and scale is not None and scaler.cur_scale < scale
        return StepOutput(float(self.zero.get_global_grad_norm()), lr, skipped, rescaled)

    def close(self) -> None:
        """Close the engine; DeepSpeed's own process groups live until the process ends."""
        module = self.__dict__.get("module")
        super().close()
        zero, self.zero, self.root = self.zero, None, None
        if zero is not None:
            zero.destroy()
            given = (self.context.live or {}).get("model") is not None  # from Python: it stays its owner's
            if self.options.stage == 3 and module is not None and not given:
                release(zero, module)
        self.__dict__.pop("partitions", None)
        self.skeleton = None


def with_one_gradient(root: Callable[..., Any], compute: Callable[[], Any]) -> Any:
    """Return ``root(compute)``; outputs with gradient leave ``root`` as one tensor and are split behind it.

    In the backward pass stage 3 records a use of ``root`` for each of its outputs that has a gradient, and all ranks
    must record the same uses. A rank whose micro-batch is a filler uses another number of outputs than the others.
    """
    learned: dict[str, Tensor] = {}

    def joined() -> Any:
        """Return the outputs of ``compute``; those with gradient as one tensor [N] under the name of the first."""
        found = compute()
        if isinstance(found, dict):
            learned.update({name: value for name, value in found.items() if value.requires_grad})
        if len(learned) < 2:
            return found
        whole = torch.cat([value.flatten() for value in learned.values()])
        return {next(iter(learned)): whole, **{n: v for n, v in found.items() if n not in learned}}

    found = root(joined)
    if len(learned) < 2:
        return found
    parts = found[next(iter(learned))].split([value.numel() for value in learned.values()])
    shaped = zip(learned.items(), parts, strict=True)
    return {**found, **{name: part.view(value.shape) for (name, value), part in shaped}}
