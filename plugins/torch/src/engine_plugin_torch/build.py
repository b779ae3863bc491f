"""What the reference engine is built of: module, units, adapter, optimizer, and what computes outputs.

The order is written once, here; backends that shard replace the small methods (``_place``, ``_shard``,
``_make_forward``, ...).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine_core.contracts.weight_names import base_weights
from engine_core.errors import ConfigError, PluginError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_core.model_config import load_hf_config
from engine_plugin_torch.attention_choice import choose_attention, with_attention
from engine_plugin_torch.device_map import SpreadModel, check_device_map
from engine_plugin_torch.feed_forward import chunk_feed_forwards
from engine_plugin_torch.linear_products import use_quicker_products
from engine_plugin_torch.lora import attach
from engine_plugin_torch.memory import Held, Settings
from engine_plugin_torch.model_loading import adopt_live, cast_parameters, load_model
from engine_plugin_torch.norms import use_fused_rmsnorm_backward
from engine_plugin_torch.optimizers import build_optimizer, check_groups, optimizer_problem, set_peak_lr
from engine_plugin_torch.options import TorchOptions
from engine_plugin_torch.packed_forward import PackedForward
from engine_plugin_torch.precision import Precision, choose, find_device
from engine_plugin_torch.quantize_model import Change, check_quantized, quantize
from engine_plugin_torch.sizing import Sizing
from engine_plugin_torch.units import checkpoint_units, compile_units, decoder_layers, units_problem
from engine_plugin_torch.value_forward import ValueForward
from engine_plugin_torch.value_models import VALUE_ROLES, load_value_model
from engine_plugin_torch.weights import identity

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.specs import Options
    from engine_plugin_torch.adapter import Adapter

log = logging.getLogger("engine")


class TorchBuild(Sizing):
    """The part of ``TorchEngine`` that runs once, in its constructor.

    Attributes:
        module: the model, in eval mode.
        adapter: of LoRA, in the module; None where the model itself is trained.
        num_skipped_steps: optimizer steps skipped for non-finite gradients, in all.
        change: what quantising did to the outputs; None where nothing is quantised.
        spread: how the layers of a frozen model lie over devices; None where one device has them all.
    """

    options_class: type[Options] = TorchOptions

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> None:
        options, table = cls._options(config), f"{context.role}.{config.backend}"
        device = find_device(options.device, context.device, table)
        choose(options, device, table)
        frozen = config.lora is not None or not trainable
        check_quantized(getattr(options, "quantize", None), device, table, frozen)
        check_device_map(options, context, table, trainable, config.lora is not None)

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
        self.spread = SpreadModel(self.options) if getattr(self.options, "device_map", None) else None
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
        # a plugin passes the name on to transformers, which has no "auto"; what it builds is not known yet
        asked = with_attention(model, None, self.device)
        module = self._steps.engine_build_model(role=role, model_config=asked, options=engine_config)
        live = (self.context.live or {}).get("model") if self.config.path is None else None
        return self._load(self._choose_attention(model, live), live) if module is None else module

    def _choose_attention(self, model: ModelConfig, live: nn.Module | None) -> ModelConfig:
        """``[model]`` with the attention that this role gets."""
        if live is not None and not isinstance(live, PreTrainedModel):
            return model
        config: Any = None
        if live is not None or model.attention == "auto":
            config = load_hf_config(model) if live is None else live.config
        name, why = choose_attention(model.attention, config, self.device)
        log.info("%s: attention '%s': %s.", self.context.role, name, why)
        return model.model_copy(update={"attention": name})

    def _load(self, model: ModelConfig, live: nn.Module | None) -> nn.Module:
        """The model of ``[model]``, or the one given from Python, as this role needs it."""
        device, placing = self._load_device, None if self.spread is None else self.spread.arguments()
        if self.context.role in VALUE_ROLES:
            return load_value_model(model, device, self._param_dtype, live, placing)
        if live is not None:
            if self.quantize and self.context.role == "actor":
                raise ConfigError(
                    f"{self._table}.quantize: a model given from Python is the caller's, and would lose "
                    "its own weights. Save it and name the folder (model.path), or leave the key out."
                )
            return adopt_live(live, model, self.context.role, device)
        return load_model(model, device, self._param_dtype, placing)

    @property
    def _load_device(self) -> torch.device:
        """Where a model lies when it was read; layers to be quantised go to the device one at a time."""
        return torch.device("cpu") if self.quantize else self.device

    def _adopt(self, built: Any) -> None:
        """Take what ``_build_model_optimizer`` gave: a module to finish, or everything."""
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
            check_groups(self.module, self.optimizer, self.context.role)

    def _refuse_changes(self) -> None:
        """A model that comes with its optimizer stays as it is."""
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
        """Make a bare module ready for this engine and give it an optimizer, by the step hooks."""
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
        """Place, adapt, wrap and shard a bare module: all but its optimizer.

        For a ``_build_model_optimizer`` with an optimizer of its own, which is made over what this returns:
        the same parameters here, parts of them in an engine that shards.
        """
        role, options = self.context.role, self.options
        head = (HEAD,) if role in VALUE_ROLES else ()
        base = identity(base_weights(module)) if self.quantize and self.config.lora else None
        module = self._place(module)
        if self.config.lora is not None:
            path = self.config.path or self.model_config.path
            self.adapter = attach(module, self.config.lora, role, self.model_config.seed, path, head, base)
        units = self._steps.engine_wrap_policy(
            lambda named: units_problem(named, module), role=role, module=module, options=options
        )
        if units is None:
            units = self._units(module)
        sharded = self._steps.engine_shard_model(role=role, module=module, units=units, options=options)
        return self._shard(module, units) if sharded is None else sharded

    def _units(self, module: nn.Module) -> list[str]:
        """Units where no plugin names any."""
        return decoder_layers(module)

    def _place(self, module: nn.Module) -> nn.Module:
        """A built module in the type and on the device that it is used in, its frozen layers quantised if asked for."""
        if self.spread is not None:
            return self._spread_out(module)
        module = cast_parameters(module, self._param_dtype)
        if not self.quantize:
            return module.to(self.device)
        whole = [HEAD, *(self.config.lora.modules_to_save if self.config.lora else ())]
        tokenizer = (self.context.live or {}).get("tokenizer")
        self.change = quantize(
            module.to("cpu"),
            self.quantize,
            self.device,
            self.precision,
            self._table,
            whole,
            tokenizer,
        )
        log.info("%s: %s, %s", self.context.role, self.quantize, self.change)
        return module

    def _spread_out(self, module: nn.Module) -> nn.Module:
        """A model that lies where its map says."""
        assert self.spread is not None
        if not self.spread.used:
            raise ConfigError(
                f"{self._table}.device_map: a plugin builds this model, and whole. Leave the key out, or place its layers in "
                "engine_build_model."
            )
        log.info("%s: %s; what is on disk is read in each pass.", self.context.role, self.spread.told(module))
        return module

    def _held(self, module: nn.Module) -> Held:
        return super()._held(module) if self.spread is None else self.spread.held(module, self.device)

    def _shard(self, module: nn.Module, units: Sequence[str]) -> nn.Module:
        """No sharding; compiled units and activation checkpointing where the options ask for them."""
        chunk = self.options.sequence_chunk_tokens
        mode = self.options.compile_mode if self._compiles else None
        chunk_feed_forwards(module, chunk, f"{self._table}.sequence_chunk_tokens", mode)
        if self._compiles:
            compile_units(module, units, self.options.compile_mode)
        elif self.device.type == "cpu":
            use_quicker_products(module)
            use_fused_rmsnorm_backward(module)
        if self.trainable and self.options.activation_checkpointing:
            checkpoint_units(module, units, lambda: bool(self._recomputed_share))
        return module

    @property
    def _steps(self) -> Any:
        """Step hooks of this role."""
        return self.context.plugins.step(self.context.role, ("train_engines", self.config.backend))

    @property
    def _table(self) -> str:
        """Where the options stand, for messages."""
        return f"{self.context.role}.{self.config.backend}"

    @property
    def quantize(self) -> str | None:
        """How the weights that are not trained are kept in few bits; None where they are whole."""
        return getattr(self.options, "quantize", None)

    def _choose_device(self) -> torch.device:
        return find_device(self.options.device, self.context.device, self._table)

    @functools.cached_property
    def precision(self) -> Precision:
        """Types of the weights and of the forward pass."""
        frozen = self.config.lora is not None or self.context.frozen
        return choose(self.options, self.device, self._table, frozen)

    @property
    def _param_dtype(self) -> torch.dtype:
        return self.precision.param

    @property
    def _compute_dtype(self) -> torch.dtype:
        return self.precision.compute

    @property
    def _settings(self) -> Settings:
        half = self.precision.compute in (torch.float16, torch.bfloat16)
        return Settings(
            param=self.precision.param,
            compute=self.precision.compute,
            chunk=0 if self.context.role in VALUE_ROLES else self.options.log_prob_chunk_tokens,
            recompute=self.options.log_prob_recompute is not False,
            wide_chunk=self.options.sequence_chunk_tokens,
            compiled=self._compiles,
            kernel=self.device.type == "cuda" and half,
        )

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
            mode=self.options.compile_mode,
            share=self.options.share_prefixes,
        )

    @property
    def _compiles(self) -> bool:
        """Whether forward passes are compiled."""
        chosen = self.options.compile
        if chosen == "auto":
            return self.device.type != "cpu" and not self.quantize and self.spread is None
        return bool(chosen)

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses: the largest, where groups have rates of their own."""
        return max(float(group["lr"]) for group in self._trained().param_groups)

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
