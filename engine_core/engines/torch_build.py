"""What the reference engine is built of: module, units, adapter, optimizer, and what computes outputs.

The order is written once, here; backends that shard replace the small methods (``_place``, ``_shard``,
``_make_forward``, ...).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine_core.engines.base import TrainEngine
from engine_core.engines.lora import attach
from engine_core.engines.model_loading import DTYPES, adopt_live, cast_parameters, load_model
from engine_core.engines.optimizers import build_optimizer, set_peak_lr
from engine_core.engines.packed_forward import PackedForward
from engine_core.engines.torch_options import TorchOptions
from engine_core.engines.units import check_units, checkpoint_units, compile_units, decoder_layers
from engine_core.engines.value_forward import ValueForward
from engine_core.engines.value_models import HEAD, VALUE_ROLES, load_value_model
from engine_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.engines.adapter import Adapter
    from engine_core.engines.base import WorkerContext
    from engine_core.specs import Options


class TorchBuild(TrainEngine):
    """The part of ``TorchEngine`` that runs once, in its constructor.

    Attributes:
        module: the model, in eval mode.
        adapter: of LoRA, in the module; None where the model itself is trained.
        num_skipped_steps: optimizer steps skipped for non-finite gradients, in all.
    """

    options_class: type[Options] = TorchOptions

    def __init__(
        self, config: RoleConfig, model_config: ModelConfig, context: WorkerContext, *, trainable: bool = True
    ) -> None:
        super().__init__(config, model_config, context, trainable=trainable)
        self.options: Any = self.options_class() if config.options is None else config.options
        self.device = self._choose_device()
        self.adapter: Adapter | None = None
        self.num_skipped_steps = 0
        self._asleep: set[str] = set()
        self._random: dict[str, str] | None = None  # random state at the last ``mark``
        if context.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._prepare()
        built = self._build_model_optimizer(
            model_path=config.path or model_config.path,
            engine_config=self.options,
            optim_config=config.optim if trainable else None,
            override_model_config=model_config.override,
            role=context.role,
        )
        self._adopt(built)
        self.forward = self._make_forward()

    def _prepare(self) -> None:
        """What must be there, or be refused, before the model is built: process groups, a layout of ranks."""

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
        return self._load(model, live) if module is None else module

    def _load(self, model: ModelConfig, live: nn.Module | None) -> nn.Module:
        """The model of ``[model]``, or the one given from Python, as this role needs it."""
        if self.context.role in VALUE_ROLES:
            return load_value_model(model, self.device, self._param_dtype, live)
        if live is not None:
            return adopt_live(live, model, self.context.role, self.device)
        return load_model(model, self.device, self._param_dtype)

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
            units = self._units(module)
        else:
            check_units(units, module)
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

    def _units(self, module: nn.Module) -> list[str]:
        """Units where no plugin names any."""
        return decoder_layers(module)

    def _place(self, module: nn.Module) -> nn.Module:
        """A built module in the type and on the device that it is trained in."""
        return cast_parameters(module, self._param_dtype).to(self.device)

    def _shard(self, module: nn.Module, units: Sequence[str]) -> nn.Module:
        """No sharding; compiled units and activation checkpointing where the options ask for them."""
        if self._compiles:
            compile_units(module, units)
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

    def _make_forward(self) -> PackedForward:
        """What computes outputs: of a value head, or of a distribution over tokens."""
        if self.context.role in VALUE_ROLES:
            return ValueForward(self.module, self.device, self._compute_dtype)
        return PackedForward(
            self.module,
            self.device,
            self._compute_dtype,
            chunk=self.options.log_prob_chunk_tokens,
            compile=self._compiles,
            recompute=self.options.log_prob_recompute,
        )

    @property
    def _compiles(self) -> bool:
        """Whether forward passes are compiled."""
        chosen = self.options.compile
        return self.device.type != "cpu" if chosen == "auto" else bool(chosen)

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses."""
        return float(self._trained().param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        set_peak_lr(self._trained(), self.lr_scheduler, lr)

    def _trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _trained(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise RuntimeError(
                f"The engine of role '{self.context.role}' is not trained: it has no optimizer."
            )
        return self.optimizer

    def _adapted(self) -> Adapter:
        if self.adapter is None:
            raise ConfigError(
                f"The role '{self.context.role}' has no adapter: its run file has no [{self.context.role}.lora]."
            )
        return self.adapter
