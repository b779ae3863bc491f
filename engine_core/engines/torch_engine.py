"""The reference train engine: one process, no sharding.

Backends that shard subclass it and replace the small methods below (``_finish``, ``_grad_norm``,
``named_weights``, ``save``, ...); the order of a step is written once, here.

The module is always in eval mode: dropout would make the log-probs of an unchanged policy differ
between two passes, so that ratios were not 1.
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
from torch.utils.checkpoint import checkpoint

from engine_core.engines import state
from engine_core.engines.base import TrainEngine
from engine_core.engines.lora import attach
from engine_core.engines.model_loading import DTYPES, adopt_live, cast_parameters, load_model
from engine_core.engines.optimizers import build_optimizer, set_peak_lr
from engine_core.engines.packed_forward import PackedForward
from engine_core.engines.torch_options import TorchOptions
from engine_core.engines.value_forward import ValueForward
from engine_core.engines.value_models import HEAD, VALUE_ROLES, load_value_model
from engine_core.engines.weights import near, own_weights, published_weights, take_weights, to_own_names
from engine_core.errors import ConfigError, DataError, PluginError, did_you_mean
from engine_core.packing import plan_micro_batches
from engine_core.types import StepOutput, TrainOutput

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.engines.adapter import Adapter
    from engine_core.engines.base import WorkerContext
    from engine_core.types import Batch, LossCall

log = logging.getLogger("engine")

PARTS = ("weights", "gradients", "optimizer")


class TorchEngine(TrainEngine):
    """See ``TrainEngine``.

    Attributes:
        module: the model, in eval mode.
        adapter: of LoRA, in the module; None where the model itself is trained.
        num_skipped_steps: optimizer steps skipped for non-finite gradients, in all.
    """

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        super().__init__(config, model_config, context, trainable=trainable)
        self.options: TorchOptions = TorchOptions() if config.options is None else config.options
        self.device = self._choose_device()
        self.adapter: Adapter | None = None
        self.num_skipped_steps = 0
        self._asleep: set[str] = set()
        self._random: dict[str, str] | None = None  # random state at the last ``mark``
        if context.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        built = self._build_model_optimizer(
            model_path=config.path or model_config.path,
            engine_config=self.options,
            optim_config=config.optim if trainable else None,
            override_model_config=model_config.override,
            role=context.role,
        )
        self._adopt(built)
        self.forward = self._make_forward()

    # -- building -----------------------------------------------------------

    def _build_model_optimizer(
        self,
        *,
        model_path: str,
        engine_config: Any,
        optim_config: Any,
        override_model_config: dict,
        role: str = "actor",
    ) -> Any:
        model = self.model_config.model_copy(update={"path": model_path, "override": override_model_config})
        module = self._steps.engine_build_model(role=role, model_config=model, options=engine_config)
        live = (self.context.live or {}).get("model") if self.config.path is None else None
        if module is None and role in VALUE_ROLES:
            module = load_value_model(model, self.device, self._param_dtype, live)
        elif module is None and live is not None:
            module = adopt_live(live, model, role, self.device)
        elif module is None:
            module = load_model(model, self.device, self._param_dtype)
        return module

    def _adopt(self, built: Any) -> None:
        """Take what ``_build_model_optimizer`` gave: a module to finish, or everything."""
        if isinstance(built, nn.Module):
            self._finish(built)
        elif isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module):
            self.module, self.optimizer, self.lr_scheduler = built
            if self.config.lora is not None:
                raise ConfigError(
                    f"[{self.context.role}.lora]: the plugin that builds this model brings its own optimizer, so no "
                    "adapter can be put in. Take the table out."
                )
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

    def _finish(self, module: nn.Module) -> None:
        """Adapt, wrap, shard and give an optimizer to a bare module, by the step hooks."""
        role, options = self.context.role, self.options
        module = self._place(module)
        if self.config.lora is not None:
            path = self.config.path or self.model_config.path
            head = (HEAD,) if role in VALUE_ROLES else ()
            self.adapter = attach(module, self.config.lora, role, self.model_config.seed, path, head)
        units = self._steps.engine_wrap_policy(role=role, module=module, options=options)
        if units is None:
            units = decoder_layers(module)
        else:
            _check_units(units, module)
        sharded = self._steps.engine_shard_model(role=role, module=module, units=units, options=options)
        self.module = self._shard(module, units) if sharded is None else sharded
        if not self.trainable:
            return
        optim = self.config.optim
        built = self._steps.engine_build_optimizer(
            role=role, module=self.module, optim_config=optim, options=options
        )
        self.optimizer, self.lr_scheduler = built or build_optimizer(
            self.module, optim, self.context.total_steps, role
        )

    def _place(self, module: nn.Module) -> nn.Module:
        """A built module in the type and on the device that it is trained in."""
        return cast_parameters(module, self._param_dtype).to(self.device)

    def _shard(self, module: nn.Module, units: Sequence[str]) -> nn.Module:
        """No sharding; activation checkpointing where the options ask for it."""
        if self.options.activation_checkpointing and self.trainable:
            checkpoint_units(module, units)
        return module

    @property
    def _steps(self) -> Any:
        """Step hooks of this role."""
        return self.context.plugins.step(self.context.role, ("train_engines", self.config.backend))

    def _choose_device(self) -> torch.device:
        return self.context.device if self.options.device == "auto" else torch.device(self.options.device)

    @property
    def _param_dtype(self) -> torch.dtype:
        return DTYPES[self.options.param_dtype]

    @property
    def _compute_dtype(self) -> torch.dtype:
        chosen = self.options.compute_dtype
        return DTYPES[self.options.param_dtype if chosen == "auto" else chosen]

    # -- forward and backward -----------------------------------------------

    def _make_forward(self) -> PackedForward:
        """What computes outputs: of a value head, or of a distribution over tokens."""
        if self.context.role in VALUE_ROLES:
            return ValueForward(self.module, self.device, self._compute_dtype)
        chunk = self.options.log_prob_chunk_tokens
        return PackedForward(self.module, self.device, self._compute_dtype, chunk)

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        self._need("weights")
        self._check_outputs(outputs)
        found = {name: torch.zeros(batch.num_tokens) for name in outputs}
        offsets = batch.offsets.tolist()
        with torch.no_grad(), contextlib.nullcontext() if adapter else self.without_adapter():
            for indices, micro in self._micro_batches(batch):
                computed = self._outputs(micro, outputs)
                places = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in indices])
                for name in outputs:
                    found[name][places] = computed[name].cpu()
        return found

    def forward_backward(self, batch: Batch, loss: LossCall) -> TrainOutput:
        self._need("weights", "gradients")
        self._check_outputs((*loss.outputs, *loss.watched))
        objective = self._resolve(loss)
        total = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}
        count = 0
        for _, micro in self._micro_batches(batch):
            outputs = self._outputs(micro, loss.outputs, loss.watched)
            value, watched = objective(outputs, micro)
            self._backward(value)
            total += value.detach()
            merge_metrics(metrics, watched)
            count += 1
        return TrainOutput(total.item(), {name: float(value) for name, value in metrics.items()}, count)

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """The plan of a batch, the same for ``infer`` and ``forward_backward``: positions, sequences."""
        together = None if batch.keep_together is None else batch.keep_together.tolist()
        for indices in plan_micro_batches(batch.lengths.tolist(), self.config.max_tokens_per_rank, together):
            yield indices, batch.select(indices).to(self.device)

    def _outputs(self, micro: Batch, grad: Sequence[str], watched: Sequence[str] = ()) -> dict[str, Tensor]:
        """[T] float32 each. No forward pass where nothing is learned: the outputs are 0."""
        if not bool(micro["loss_mask"].any()):
            zeros = torch.zeros(micro.num_tokens, device=self.device)
            return dict.fromkeys((*grad, *watched), zeros)
        return self.forward(micro, grad, watched)

    def _check_outputs(self, names: Sequence[str]) -> None:
        known = self.forward.outputs
        for name in names:
            if name not in known:
                raise ValueError(
                    f"Unknown output '{name}' of {type(self).__name__} in the role '{self.context.role}'."
                    + did_you_mean(name, known)
                )

    def _backward(self, value: Tensor) -> None:
        if value.requires_grad:  # not where the micro-batch has no loss tokens
            value.backward()

    def _resolve(self, loss: LossCall) -> Any:
        from engine_core.algorithms.objectives import resolve_loss

        return resolve_loss(loss, self.context.plugins)

    # -- optimizer ----------------------------------------------------------

    def optimizer_step(self) -> StepOutput:
        self._need(*PARTS)
        optimizer, lr = self._trained(), self.lr
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
        return StepOutput(grad_norm=norm, lr=lr, skipped=skipped)

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses."""
        return float(self._trained().param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        set_peak_lr(self._trained(), self.lr_scheduler, lr)

    def _grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients, the same on every rank."""
        return get_total_norm(self._grads())

    def _clip(self, max_norm: float, norm: Tensor) -> None:
        clip_grads_with_norm_(self._trainable_parameters(), max_norm, norm)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._trainable_parameters() if p.grad is not None]

    def _trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _trained(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise RuntimeError(
                f"The engine of role '{self.context.role}' is not trained: it has no optimizer."
            )
        return self.optimizer

    # -- weights ------------------------------------------------------------

    def named_weights(self, to: str = "all", adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        if adapter:
            return iter(self._adapted().tensors().items())
        return published_weights(self.module, None if self.adapter is None else self.adapter.merged())

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        stream = to_own_names(self.module, stream)
        if self.adapter is None:
            take_weights(self.module, stream, mix)
        else:
            self.adapter.take(stream, mix)

    def without_adapter(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.adapter is None else self.adapter.off()

    def _adapted(self) -> Adapter:
        if self.adapter is None:
            raise ConfigError(
                f"The role '{self.context.role}' has no adapter: its run file has no [{self.context.role}.lora]."
            )
        return self.adapter

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        self._need("weights")
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), self.forward.autocast():  # the arithmetic of the forward that trains
                yield self.module
        finally:
            self.module.train(training)

    # -- state --------------------------------------------------------------

    def mark(self) -> None:
        self._random = state.random_state(self.device)

    def save(self, folder: Path) -> Future[None]:
        """Written when this returns, also from an engine asleep: tensors in safetensors, scalars in JSON.

        Of a model with an adapter only that, and what tells its base.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = own_weights(self.module) if self.adapter is None else self.adapter.tensors()
        state.save_tensors(folder / state.WEIGHTS, weights)
        scalars: dict[str, Any] = {
            "random": self._random or state.random_state(self.device),
            "num_skipped_steps": self.num_skipped_steps,
            "base": None if self.adapter is None else self.adapter.base_identity(),
        }
        if self.optimizer is not None:
            tensors, scalars["optimizer"] = state.optimizer_state(self.optimizer, self.module)
            state.save_tensors(folder / state.OPTIMIZER, tensors)
        if self.lr_scheduler is not None:
            scalars["lr_scheduler"] = self.lr_scheduler.state_dict()
        state.save_json(folder / state.STATE, scalars)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, folder: Path) -> None:
        scalars = state.load_json(folder / state.STATE)
        self._check_base(folder, scalars.get("base"))
        weights = None if self.adapter is None else self.adapter.tensors()
        take_weights(self.module, state.load_tensors(folder / state.WEIGHTS).items(), own=weights)
        if self.optimizer is not None:
            if "optimizer" not in scalars:
                raise DataError(f"{folder} holds no optimizer: it was written by a role that is not trained.")
            tensors = state.load_tensors(folder / state.OPTIMIZER)
            state.load_optimizer_state(self.optimizer, self.module, tensors, scalars["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(scalars["lr_scheduler"])
            saved = scalars["optimizer"]["groups"]  # many a scheduler makes a rate from the one before
            for group, was in zip(self._trained().param_groups, saved, strict=True):
                group.update({key: was[key] for key in ("lr", "initial_lr") if key in was})
            self.set_lr(self.config.optim.lr)  # the run file's peak, at this step of its schedule
        self.num_skipped_steps = scalars["num_skipped_steps"]
        state.set_random_state(scalars["random"], self.device)
        self._random = None

    def _check_base(self, folder: Path, saved: str | None) -> None:
        """An adapter fits the base that it was trained on, a whole model none."""
        mine = None if self.adapter is None else self.adapter.base_identity()
        if saved == mine:
            return
        role = self.context.role
        if mine is None or saved is None:
            holds, table = ("an adapter", "has no") if mine is None else ("a whole model", "has an")
            raise DataError(f"{folder} holds {holds}, but this run {table} [{role}.lora].")
        raise DataError(
            f"{folder} holds an adapter of another base model than '{self.config.path or self.model_config.path}' "
            f"(identity {saved[:8]}, here {mine[:8]}). Bring the base back that the run was started with."
        )

    def export(self, folder: Path, adapter: bool = False) -> None:
        """``save_pretrained`` where the module has it, else ``model.safetensors`` and the config it was built from."""
        if adapter:
            self._adapted().export(folder)
            return
        merged = {} if self.adapter is None else {"state_dict": dict(self.adapter.merged())}
        if hasattr(self.module, "save_pretrained"):
            self.module.save_pretrained(folder, **merged)  # type: ignore[operator]
            return
        folder.mkdir(parents=True, exist_ok=True)
        weights = merged.get("state_dict") or own_weights(self.module)
        state.save_tensors(folder / "model.safetensors", weights)
        if hasattr(getattr(self.module, "config", None), "save_pretrained"):
            self.module.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        else:
            state.copy_config(self.config.path or self.model_config.path, self.model_config.override, folder)

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Weights and optimizer state go to the CPU; gradients are dropped (step before)."""
        _check_parts(keep)
        parts = set(PARTS) - set(keep)
        if "gradients" in parts:
            self.module.zero_grad(set_to_none=True)
        self._move(parts, torch.device("cpu"))
        self._asleep |= parts
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def wake(self, only: Sequence[str] | None = None) -> None:
        _check_parts(only or ())
        parts = self._asleep & set(PARTS if only is None else only)
        self._move(parts, self.device)
        self._asleep -= parts

    def close(self) -> None:
        self.optimizer = self.lr_scheduler = None
        for name in ("module", "forward"):
            self.__dict__.pop(name, None)

    def _move(self, parts: set[str], device: torch.device) -> None:
        if "weights" in parts:
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                tensor.data = tensor.data.to(device)
        if "optimizer" in parts and self.optimizer is not None:
            for values in self.optimizer.state.values():
                for value in values.values():
                    if isinstance(value, Tensor):
                        value.data = value.data.to(device)

    def _need(self, *parts: str) -> None:
        missing = [part for part in parts if part in self._asleep]
        if missing:
            raise RuntimeError(
                f"The engine of role '{self.context.role}' is asleep ({', '.join(missing)}): wake it first."
            )


def decoder_layers(module: nn.Module) -> list[str]:
    """Names of the members of the longest ``ModuleList``: the default units."""
    lists = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    if not lists:
        return []
    name, layers = max(lists, key=lambda pair: len(pair[1]))
    return [f"{name}.{index}" for index in range(len(layers))]


def checkpoint_units(module: nn.Module, units: Sequence[str]) -> None:
    """Recompute each unit in the backward pass. Parameter names stay as they are."""
    for name in units:
        unit = module.get_submodule(name)
        unit.forward = functools.partial(
            checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False
        )


def merge_metrics(total: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Add metrics of one micro-batch; of ``max/`` ones keep the largest."""
    for name, value in new.items():
        if name not in total:
            total[name] = value
        elif name.startswith("max/"):
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = total[name] + value


def _check_units(units: Sequence[str], module: nn.Module) -> None:
    known = {name for name, _ in module.named_modules() if name}
    for name in units:
        if name not in known:
            raise PluginError(
                f"engine_wrap_policy named '{name}', which is no submodule of {type(module).__name__}."
                + near(name, known)
            )


def _check_parts(names: Iterable[str]) -> None:
    for name in names:
        if name not in PARTS:
            raise ValueError(f"Unknown part '{name}' of a train engine." + did_you_mean(name, PARTS))
