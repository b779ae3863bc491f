"""The reference train engine: one process, no sharding.

Backends that shard subclass it and override the small methods below (``_finish``, ``_grad_norm``,
``named_weights``, ``save``, ...). The order of a step is written once, here.

The module is always in eval mode. With dropout, the log-probs of an unchanged policy would differ
between two passes, and ratios would not be 1.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine_core.contracts.engines import TrainEngine
from engine_core.contracts.weight_names import base_weights
from engine_core.errors import ConfigError, PluginError, did_you_mean
from engine_core.metrics import merge
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_core.packing import plan_micro_batches
from engine_core.timeline import counting
from engine_core.types import StepOutput, TrainOutput
from engine_plugin_torch.budget import MemoryBudget
from engine_plugin_torch.build import ModelBuilder
from engine_plugin_torch.checkpoint import PARTS, StateStore
from engine_plugin_torch.log_probs import zero_outputs
from engine_plugin_torch.lora import adapted_layers, attach
from engine_plugin_torch.loss_scale import LossScale
from engine_plugin_torch.memory_need import memory_need
from engine_plugin_torch.optimizers import build_optimizer, check_groups, optimizer_problem, set_peak_lr
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.packed_forward import PackedForward, ValueForward
from engine_plugin_torch.precision import Precision, check_mixed, choose, find_device
from engine_plugin_torch.quantize_model import Change, check_quantized
from engine_plugin_torch.skeleton import blank_model
from engine_plugin_torch.transfer import Fetched, numbers, on_host, send_batch
from engine_plugin_torch.units import checkpoint_units, compile_units, decoder_layers, units_problem
from engine_plugin_torch.value_models import VALUE_ROLES
from engine_plugin_torch.weights import identity, published_weights, take_weights, to_own_names

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.specs import Options
    from engine_core.types import Batch, LossCall
    from engine_plugin_torch.adapter import Adapter

log = logging.getLogger("engine")


class TorchEngine(TrainEngine):
    """The train engine of a single process.

    Attributes:
        builder: reads the model and places it.
        budget: decides how many tokens fit into a micro-batch.
        store: writes checkpoints and exports, and offloads to the CPU.
        module: the model, in eval mode.
        adapter: the LoRA adapter in the module; None where the model itself is trained.
        loss_scale: the factor of the loss in fp16; 1 in other types.
        num_skipped_steps: total optimizer steps skipped because of non-finite gradients.
        change: the effect of quantization; None where nothing is quantized.
        options: the option table of the backend.
        device: the device of this worker.
        forward: computes the outputs of a pack.
    """

    options_class: type[Options] = TorchOptions  #: the option table
    builder_class: type[ModelBuilder] = ModelBuilder  #: of ``builder``
    budget_class: type[MemoryBudget] = MemoryBudget  #: of ``budget``
    store_class: type[StateStore] = StateStore  #: of ``store``
    memory_need = classmethod(memory_need)

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> None:
        """Check device, precision and quantization of the role's options."""
        options, table = cls._options(config), f"{context.role}.{config.backend}"
        device = find_device(options.device, context.device, table)
        check_mixed(context, choose(options, device, table).param, f"{table}.param_dtype")
        frozen = config.lora is not None or not trainable
        check_quantized(getattr(options, "quantize", None), device, table, frozen)

    @classmethod
    def check_model(
        cls, config: RoleConfig, model_config: ModelConfig, role: str, processes: int | None
    ) -> None:
        """Refuse an adapter that does not fit the model; an engine that builds its own model refuses it at the start."""
        if config.lora is not None and cls._build_model_optimizer is TorchEngine._build_model_optimizer:
            plain = model_config.model_copy(update={"attention": "eager"})  # which every model has
            module = blank_model(plain, role, torch.float32)
            adapted_layers(module, config.lora, role, (HEAD,) if role in VALUE_ROLES else ())

    @classmethod
    def _options(cls, config: RoleConfig) -> Any:
        return cls.options_class() if config.options is None else config.options

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        super().__init__(config, model_config, context, trainable=trainable)
        self.check(config, context, trainable=trainable)
        self.options = self._options(config)
        self.device = self._choose_device()
        log.info("%s: %s on %s.", context.role, self.precision, self.device)
        self.change: Change | None = None
        self.adapter: Adapter | None = None
        self.num_skipped_steps = 0
        fp16 = trainable and self.precision.compute == torch.float16
        self.loss_scale = LossScale(self.options.loss_scale if fp16 else None)
        self.builder = self.builder_class(self)
        self.budget = self.budget_class(self)
        self.store = self.store_class(self)
        if context.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._prepare()
        built = self._build_model_optimizer(
            model_path=model_config.path,
            engine_config=self.options,
            optim_config=config.optim if trainable else None,
            override_model_config=model_config.override,
            role=context.role,
        )
        self._adopt(built)
        self.forward = self._make_forward()

    def _prepare(self) -> None:
        """Create process groups and check the layout of ranks before the model is built (nothing to do here)."""

    def _build_model_optimizer(
        self,
        *,
        model_path: str,
        engine_config: Any,
        optim_config: Any,
        override_model_config: dict,
        role: str = "actor",
    ) -> Any:
        """Return the module of a role alone; plugins override this. ``TrainEngine`` describes arguments and result."""
        model = self.model_config.model_copy(update={"path": model_path, "override": override_model_config})
        return self.builder.build(model, engine_config)

    def _adopt(self, built: Any) -> None:
        """Adopt the result of ``_build_model_optimizer``: a bare module, or module, optimizer and scheduler."""
        if isinstance(built, nn.Module):
            self._finish(built)
        elif isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module):
            self.module, self.optimizer, self.lr_scheduler = built
            self._refuse_changes()
        else:
            raise PluginError(
                f"{type(self).__name__}._build_model_optimizer returned {type(built).__name__}; "
                "expected a module, or (module, optimizer, lr_scheduler)."
            )
        self.module.eval()
        if not self.trainable:
            self.module.requires_grad_(False)
        elif self.optimizer is None:
            raise PluginError(
                f"{type(self).__name__}._build_model_optimizer returned no optimizer for a trained role."
            )
        else:
            check_groups(self.module, self.optimizer, self.context.role, self.config.optim.lr)

    def _refuse_changes(self) -> None:
        """Refuse ``[lora]`` and ``quantize`` for a model that a plugin built together with its optimizer."""
        role = self.context.role
        if self.config.lora is not None and self.adapter is None:
            raise ConfigError(
                f"[{role}.lora]: the plugin that builds this model brings its own optimizer, so no "
                "adapter can be put in. Take the table out."
            )
        if self.quantize and self.change is None:
            raise ConfigError(
                f"{self._table}.quantize: the plugin that builds this model brings its own optimizer, "
                "so its layers cannot be replaced. Leave the key out."
            )

    def _finish(self, module: nn.Module) -> None:
        """Distribute a bare module and build its optimizer, through the step hooks."""
        role, options = self.context.role, self.options
        self.module = self._distribute(module)
        if not self.trainable:
            return
        optim, total_steps = self.config.optim, self.context.total_steps
        resolved = optim.model_copy(update={"decay_steps": optim.decay_steps or total_steps})
        built = self._steps.engine_build_optimizer(
            optimizer_problem, role=role, module=self.module, optim_config=resolved, options=options
        )
        self.optimizer, self.lr_scheduler = built or build_optimizer(self.module, optim, total_steps, role)

    def _distribute(self, module: nn.Module) -> nn.Module:
        """Place, adapt, wrap and shard a bare module, without its optimizer.

        A ``_build_model_optimizer`` that builds its own optimizer calls this first and builds the optimizer over the
        parameters of the returned module. An engine that shards returns parts of them.
        """
        role, options = self.context.role, self.options
        head = (HEAD,) if role in VALUE_ROLES else ()
        base = identity(base_weights(module)) if self.quantize and self.config.lora else None
        module = self._place(module)
        if self.config.lora is not None:
            model = self.model_config
            self.adapter = attach(module, self.config.lora, role, model.seed, model.path, head, base)
        units = self._steps.engine_wrap_policy(
            lambda named: units_problem(named, module), role=role, module=module, options=options
        )
        if units is None:
            units = self._units(module)
        sharded = self._steps.engine_shard_model(role=role, module=module, units=units, options=options)
        return self._shard(module, units) if sharded is None else sharded

    def _units(self, module: nn.Module) -> list[str]:
        """Return the default units, used where no plugin names any: the decoder layers."""
        return decoder_layers(module)

    def _place(self, module: nn.Module) -> nn.Module:
        """Return a built module in its type and on its device."""
        return self.builder.place(module)

    def _shard(self, module: nn.Module, units: Sequence[str]) -> nn.Module:
        """Compile and checkpoint the units as the options say; there is no sharding here."""
        if self._compiles:
            compile_units(module, units)
        if self.trainable and self.options.activation_checkpointing:
            checkpoint_units(module, units, lambda: bool(self.budget.recomputed_share))
        return module

    @property
    def _steps(self) -> Any:
        """The step hooks of this role."""
        return self.context.plugins.step(self.context.role, ("train_engines", self.config.backend))

    @property
    def _table(self) -> str:
        """The name of the options' table, for messages."""
        return f"{self.context.role}.{self.config.backend}"

    @property
    def quantize(self) -> str | None:
        """The quantization of weights that are not trained; None where they are not quantized."""
        return getattr(self.options, "quantize", None)

    def _choose_device(self) -> torch.device:
        return find_device(self.options.device, self.context.device, self._table)

    @functools.cached_property
    def precision(self) -> Precision:
        """Types of the weights and of the forward pass."""
        frozen = self.config.lora is not None or self.context.frozen
        return choose(self.options, self.device, self._table, frozen)

    @property
    def _compute_dtype(self) -> torch.dtype:
        return self.precision.compute

    def _make_forward(self) -> PackedForward:
        """Build the forward pass: with a value head in value roles, else with a distribution over tokens."""
        if self.context.role in VALUE_ROLES:
            return ValueForward(self.module, self.device, self._compute_dtype)
        return PackedForward(
            self.module,
            self.device,
            self._compute_dtype,
            chunk=self.options.log_prob_chunk_tokens,
            compile=self._compiles,
            recompute=self.options.log_prob_recompute,
            share=self.options.share_prefixes,
        )

    @property
    def _compiles(self) -> bool:
        """Whether forward passes are compiled."""
        return self.options.compiles(self.device.type != "cpu", bool(self.quantize))

    @property
    def lr(self) -> float:
        """Learning rate of the next step; the largest over the parameter groups."""
        return max(float(group["lr"]) for group in self._trained().param_groups)

    def set_lr(self, lr: float) -> None:
        set_peak_lr(self._trained(), self.lr_scheduler, lr)

    def _trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _trained(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise RuntimeError(f"The role '{self.context.role}' is not trained: it has no optimizer.")
        return self.optimizer

    def _adapted(self) -> Adapter:
        if self.adapter is None:
            raise ConfigError(
                f"The role '{self.context.role}' has no adapter: its run file has no [{self.context.role}.lora]."
            )
        return self.adapter

    # -- forward and backward -----------------------------------------------

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        """Compute outputs [T] or [T, K] without gradient, with half the tokens after an out-of-memory error."""
        self.store.need("weights")
        self._check_outputs(outputs)
        return self.budget.retry(batch, functools.partial(self._infer, batch, outputs, adapter))

    def _infer(self, batch: Batch, outputs: Sequence[str], adapter: bool) -> dict[str, Tensor]:
        """Compute outputs in one pass over the micro-batches of a batch."""
        found, fetched = zero_outputs(outputs, batch), Fetched(self.device)
        parts: list[tuple[Tensor, dict[str, Tensor]]] = []
        offsets = batch.offsets.tolist()
        # A compiled forward rounds differently with and without gradient, but a ratio of 1 must be exactly 1.
        as_trained = self._compiles and self.trainable
        with (
            torch.set_grad_enabled(as_trained),
            contextlib.nullcontext() if adapter else self.without_adapter(),
        ):
            for indices, micro in self._micro_batches(batch):
                computed = self._outputs(micro, outputs)
                if not indices:
                    continue
                places = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in indices])
                parts.append((places, {name: fetched.fetch(computed[name].detach()) for name in outputs}))
        fetched.wait()
        for places, values in parts:
            for name, value in values.items():
                found[name][places] = value
        return found

    def forward_backward(self, batch: Batch, loss: LossCall) -> TrainOutput:
        """Accumulate the gradient; retry with half the tokens if no gradient existed before the call."""
        self.store.need("weights", "gradients")
        self._check_outputs((*loss.outputs, *loss.watched))
        if self._grads():  # a retry would add to the gradients of an earlier call
            return self._accumulate(batch, loss)
        once = functools.partial(self._accumulate, batch, loss)
        return self.budget.retry(batch, once, functools.partial(self.module.zero_grad, set_to_none=True))

    def _accumulate(self, batch: Batch, loss: LossCall) -> TrainOutput:
        """Accumulate gradients in one pass over the micro-batches of a mini-batch."""
        objective = self._resolve(loss)
        total = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}
        count = 0
        for indices, micro in self._micro_batches(batch):
            outputs = self._outputs(micro, loss.outputs, loss.watched)
            if indices:
                value, watched = objective(outputs, micro)
                total += value.detach()
                merge(metrics, watched, torch.maximum)
            else:
                value = torch.stack([output.sum() for output in outputs.values()]).sum()
            self._backward(value)
            count += 1
        summed, *values = numbers([total, *metrics.values()], self.device)  # the one wait for the device
        output = self._over_ranks(TrainOutput(summed, dict(zip(metrics, values, strict=True)), count))
        self.loss_scale.see(output.loss)
        return output

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Yield micro-batches as (indices, sequences on the device); an engine may add fillers without indices, which add nothing."""
        together = None if batch.keep_together is None else batch.keep_together.tolist()
        plan = plan_micro_batches(batch.lengths.tolist(), self.budget.tokens, together)
        with counting(len(plan)) as add:
            for indices in plan:
                yield indices, send_batch(batch.select(indices), self.device)
                add(1)

    def _outputs(self, micro: Batch, grad: Sequence[str], watched: Sequence[str] = ()) -> dict[str, Tensor]:
        """Compute outputs: [T] each, or [T, K]. Without loss tokens they are 0, and no forward pass runs."""
        if not bool(on_host(micro["loss_mask"]).any()):
            return zero_outputs((*grad, *watched), micro, self.device)
        return self.forward(micro, grad, watched)

    def _check_outputs(self, names: Sequence[str]) -> None:
        known = self.forward.outputs
        for name in names:
            if name not in known:
                unknown = (
                    f"Unknown output '{name}' of {type(self).__name__} in the role '{self.context.role}'."
                )
                raise ValueError(unknown + did_you_mean(name, known))

    def _backward(self, value: Tensor) -> None:
        if value.requires_grad:  # False where the micro-batch has no loss tokens
            self.loss_scale.scaled(value).backward()

    def _over_ranks(self, output: TrainOutput) -> TrainOutput:
        """Return loss and metrics of the whole batch from those of this rank's share."""
        return output

    def _resolve(self, loss: LossCall) -> Any:
        from engine_core.algorithms.objectives import resolve_loss

        return resolve_loss(loss, self.context.plugins)

    # -- optimizer ----------------------------------------------------------

    def scale_gradients(self, factor: float) -> None:
        self.loss_scale.multiply(self._grads(), factor)

    def optimizer_step(self) -> StepOutput:
        self.store.need(*PARTS)
        optimizer, lr = self._trained(), self.lr
        self.loss_scale.unscale(self._grads())
        norm_tensor = self._grad_norm()
        norm = float(norm_tensor)
        skipped = not math.isfinite(norm)
        if not skipped:
            if self.config.optim.max_grad_norm > 0:
                self._clip(self.config.optim.max_grad_norm, norm_tensor)
            optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self.num_skipped_steps += skipped
        return StepOutput(norm, lr, skipped, rescaled=self.loss_scale.stepped(skipped))

    def _grad_norm(self) -> Tensor:
        """Return the global L2 norm of the gradients, the same on every rank."""
        return get_total_norm(self._grads())

    def _clip(self, max_norm: float, norm: Tensor) -> None:
        clip_grads_with_norm_(self._trainable_parameters(), max_norm, norm)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._trainable_parameters() if p.grad is not None]

    # -- weights ------------------------------------------------------------

    def adapter_config(self) -> bytes:
        return self._adapted().config_file()

    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor ``[D0, ...]``): merged with the adapter, or of the adapter only."""
        if adapter:
            return iter(self._adapted().tensors().items())
        return published_weights(self.module, None if self.adapter is None else self.adapter.merged())

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load tensors ``[D0, ...]`` by published names into the module, or through its adapter."""
        stream = to_own_names(self.module, stream)
        if self.adapter is None:
            take_weights(self.module, stream, mix)
        else:
            self.adapter.take(stream, mix)

    def without_adapter(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.adapter is None else self.adapter.off()

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """Yield the engine's own module in eval mode, with the autocast of the training forward pass."""
        self.store.need("weights")
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), self.forward.autocast():  # the arithmetic of the forward that trains
                yield self.module
        finally:
            self.module.train(training)

    # -- state --------------------------------------------------------------

    def mark(self) -> None:
        self.store.mark()

    def save(self, folder: Path) -> Future[None]:
        return self.store.save(folder)

    def load(self, folder: Path) -> None:
        self.store.load(folder)

    def export(self, folder: Path, adapter: bool = False) -> None:
        self.store.export(folder, adapter)

    def sleep(self, keep: Sequence[str] = ()) -> None:
        self.store.sleep(keep)

    def wake(self, only: Sequence[str] | None = None) -> None:
        self.store.wake(only)

    def close(self) -> None:
        self.store.close()
        self.optimizer = self.lr_scheduler = None
        for name in ("module", "forward"):
            self.__dict__.pop(name, None)
