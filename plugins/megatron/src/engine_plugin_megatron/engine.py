"""The train engine ``megatron``: models of megatron-core with tensor, pipeline, context, expert and data parallelism.

Unlike in ``TorchEngine``, megatron-core builds the model, runs it and takes the optimizer steps. All ranks of one model
copy receive the same sequences and plan the same micro-batches; the number of micro-batches is equal on all ranks. The
micro-batches run through the pipeline's schedule. The last stage computes outputs and the loss, and broadcasts outputs
to the other stages. Checkpoints, exports and offload are in ``checkpoint``.

megatron-core is imported where it is used, so that runs on another backend and ``engine plugins`` do not wait for it.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine_core.errors import ConfigError, DataError, PluginError
from engine_core.metrics import merge
from engine_core.model_config import load_hf_config
from engine_core.types import StepOutput, TrainOutput
from engine_plugin_megatron.checkpoint import MegatronStore
from engine_plugin_megatron.layout import check_layout, layout_of
from engine_plugin_megatron.options import MegatronOptions
from engine_plugin_torch import state
from engine_plugin_torch.checkpoint import PARTS
from engine_plugin_torch.data_parallel import DataParallelEngine, SharedBudget, filler
from engine_plugin_torch.log_probs import zero_outputs
from engine_plugin_torch.optimizers import build_schedule
from engine_plugin_torch.precision import NAMED, Precision, check_mixed, find_device, has_bf16
from engine_plugin_torch.transfer import numbers, send_batch
from engine_plugin_torch.value_models import VALUE_ROLES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine_core.config import ModelConfig, RoleConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.types import Batch, LossCall
    from engine_plugin_megatron.heads import Head
    from engine_plugin_megatron.optimizer import Steps
    from engine_plugin_megatron.pipeline import Micro
    from engine_plugin_megatron.ranks import Ranks

log = logging.getLogger("engine")

UNREAD = ("engine_build_model", "engine_build_optimizer", "engine_shard_model", "engine_wrap_policy")
"""Step hooks that have no meaning for models that are not transformers' own."""


class MegatronBudget(SharedBudget):
    """The memory budget of megatron-core's layers, which have no memory estimate: ``auto`` is 8192 tokens."""

    engine: MegatronEngine

    def estimate(self) -> None:
        return None  # megatron-core's layers have no memory estimate

    @classmethod
    def held_by(cls, *args: Any, **facts: Any) -> None:
        """Return None: the layers have no memory estimate."""

    @property
    def recomputed_share(self) -> float:
        """The share of layers that are recomputed: 1 with ``recompute = 'full'``, else 0."""
        return float(self.engine.options.recompute == "full")


class MegatronEngine(DataParallelEngine):
    """A ``TrainEngine`` on megatron-core. Every method but ``layout``, ``mark`` and ``set_...`` is collective.

    Attributes:
        chunks: this rank's parts of the model (``GPTModel``).
        steps: the optimizer; None for a role that is not trained.
        shapes: the shapes of all the model's weights, by the names of a Hugging Face folder.
        models: the chunks, in megatron-core's ``DistributedDataParallel`` where the role is trained.
        pipeline: the runner of micro-batches through ``models``.
        forward: the head of the last stage.
    """

    options: MegatronOptions
    ranks: Ranks
    chunks: list[Any]
    steps: Steps | None
    hf_config: PretrainedConfig
    shapes: dict[str, tuple[int, ...]]
    store: MegatronStore
    options_class = MegatronOptions
    budget_class = MegatronBudget
    store_class = MegatronStore
    forward: Head  # type: ignore[assignment]

    # -- building -----------------------------------------------------------

    @classmethod
    def check(cls, config: RoleConfig, context: WorkerContext, *, trainable: bool = True) -> None:
        """Refuse a role that cannot run: its layout, adapters, type or device.

        Raises:
            ConfigError: the ranks do not fit the layout, the role has an adapter, the machine has no CUDA device, or
                the device lacks bfloat16, or the run mixes weights into bfloat16.
        """
        options, table = cls._options(config), f"{context.role}.{config.backend}"
        layout_of(options, context.world_size, context.role)
        _check_adapter(config, context.role)
        device = find_device(options.device, context.device, table)
        if options.compute_dtype == "bf16" and not has_bf16(device):
            raise ConfigError(
                f"{table}.compute_dtype: 'bf16', but {device} has no bfloat16. Set it to 'fp32'."
            )
        check_mixed(context, _compute_type(options, device), f"{table}.compute_dtype")
        if options.cpu_emulation and device.type != "cpu":
            raise ConfigError(
                f"{table}.cpu_emulation: true, but the device is {device}. Take the key out to use it."
            )
        if options.cpu_emulation:
            return
        try:
            torch.empty(0, device="cuda")
        except (RuntimeError, AssertionError) as error:  # the class depends on torch's build
            raise ConfigError(
                f"{context.role}.backend is '{config.backend}', and megatron-core needs a CUDA device; this machine has none. "
                f"To try the run file on a CPU set {table}.cpu_emulation = true."
            ) from error

    @classmethod
    def check_model(
        cls, config: RoleConfig, model_config: ModelConfig, role: str, processes: int | None
    ) -> None:
        """Refuse an adapter, and a layout that does not fit the model or the number of processes."""
        _check_adapter(config, role)
        options, hf = cls._options(config), load_hf_config(model_config)
        known = hasattr(hf, "num_key_value_heads")  # a start refuses other architectures
        if processes is not None and known:
            mesh = layout_of(options, processes, role)
            check_layout(hf, mesh, f"{role}.megatron", sequence_parallel=options.sequence_parallel)

    @functools.cached_property
    def precision(self) -> Precision:
        """The types of the optimizer's weights and of the forward pass."""
        compute = _compute_type(self.options, self.device)
        return Precision(torch.float32 if self.trainable else compute, compute)

    def _prepare(self) -> None:
        """Refuse hooks and layouts that do not fit the model's config, then create the process groups."""
        if self.options.cpu_emulation:
            from engine_plugin_megatron.cpu_emulation import emulate

            emulate()
        from engine_plugin_megatron.models import build
        from engine_plugin_megatron.ranks import Ranks

        role = self.context.role
        for hook in UNREAD:
            if self.context.plugins.overrides(hook):
                raise ConfigError(
                    f"{role}.backend is '{self.config.backend}', which does not ask {hook}, and a plugin of this run answers it. "
                    "Take the plugin out, or override _build_model_optimizer of the engine."
                )
        mesh = layout_of(self.options, self.context.world_size, role)
        live = self._live()
        self.hf_config = (
            load_hf_config(self.model_config) if live is None else copy.deepcopy(live.config)  # type: ignore[assignment]
        )
        if role in VALUE_ROLES:
            self.hf_config.num_labels = 1
        self.megatron_config = build.transformer_config(
            self.hf_config,
            mesh,
            self.options,
            dtype=self.precision.compute,
            plugins=self.context.plugins,
            table=f"{role}.megatron",
            calculate_per_token_loss=True,  # read when gradient buffers are created: sum, not average
            **_recomputation(self.options.recompute),
        )
        self.chunks, self.steps = [], None
        self.models: list[Any] = []
        self.ranks = Ranks(mesh, self.context, self.device)

    def _live(self) -> nn.Module | None:
        """Return the model given from Python, or None."""
        live: nn.Module | None = (self.context.live or {}).get("model") if self.config.path is None else None
        if live is not None and not hasattr(live, "config"):
            raise ConfigError(
                f"{self.context.role}: '{self.config.backend}' takes no {type(live).__name__} from Python, only models of "
                "transformers. Save it and name the folder (model.path)."
            )
        return live

    def _build_model_optimizer(
        self,
        *,
        model_path: str,
        engine_config: Any,
        optim_config: Any,
        override_model_config: dict,
        role: str = "actor",
    ) -> Any:
        """Build this rank's chunks with their first weights; for a trained role also wrap them and build the optimizer.

        Returns:
            ``(module, optimizer, lr_scheduler)``: the chunks, and an optimizer over placeholder weights that only
            carries the schedule's learning rate, which ``optimizer_step`` reads. megatron-core's optimizer is
            ``self.steps``.
        """
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.reading import first_weights

        before = state.random_state(self.device)
        self.chunks = self._build_chunks(role in VALUE_ROLES)
        state.set_random_state(before, self.device)  # random initial values are drawn, then replaced
        plan = weights.plan(self.hf_config, self.megatron_config, role in VALUE_ROLES)
        self.shapes = {
            source.name: source.shape
            for whole in plan
            for section in whole.joined.sections
            for source in section
        }
        module, optimizer, scheduler = nn.ModuleList(self.chunks), None, None
        self.models = list(self.chunks)
        if optim_config is not None:
            optimizer, scheduler = self._train(optim_config)
        model = self.model_config.model_copy(update={"path": model_path, "override": override_model_config})
        error: Exception | None = None
        try:
            self.store.fill(first_weights(model, role, self._live(), self.shapes))
        except Exception as problem:
            error = problem
        self.ranks.share(error, f"Reading '{model.path}'", DataError)
        return module, optimizer, scheduler

    def _build_chunks(self, value_head: bool) -> list[Any]:
        """Build this rank's chunks of the model: one, or `virtual_pp` of them."""
        from engine_plugin_megatron.models import build

        stage, mesh = self.ranks.pp.rank(), self.ranks.mesh
        chunks = [
            build.gpt_model(
                self.hf_config,
                self.megatron_config,
                pre_process=stage == 0 and turn == 0,
                post_process=stage == mesh.pp - 1 and turn == mesh.vp - 1,
                vp_stage=turn if mesh.vp > 1 else None,
                value_head=value_head,
            )
            for turn in range(mesh.vp)
        ]
        # there is no dropout, so train mode only allows recomputation of activations
        return [chunk.train(self.trainable) for chunk in chunks]

    def _train(self, optim: Any) -> tuple[torch.optim.Optimizer, Any]:
        """Wrap the chunks and build their optimizer and schedule."""
        from engine_plugin_megatron.optimizer import Steps, with_gradients
        from engine_plugin_megatron.pipeline import synchronised

        wrapped = with_gradients(self.chunks, self.options)
        self.models = list(wrapped)
        synchronised(wrapped, self.options.overlap_grad_reduce)
        self.steps = Steps(wrapped, self.options, optim, self.precision.compute, self.loss_scale)
        # the groups of the core's AdamW: matrices, then vectors
        groups = [{"params": [torch.zeros(())], "weight_decay": decay} for decay in (optim.weight_decay, 0.0)]
        rate = torch.optim.SGD(groups, lr=optim.lr)
        return rate, build_schedule(rate, optim, self.context.total_steps, self.context.role)

    def _adopt(self, built: Any) -> None:
        if not (isinstance(built, tuple) and len(built) == 3 and isinstance(built[0], nn.Module)):
            raise PluginError(
                f"{type(self).__name__}._build_model_optimizer returned {type(built).__name__}; expected what that of "
                "MegatronEngine returns: (module, optimizer, lr_scheduler)."
            )
        self.module, self.optimizer, self.lr_scheduler = built
        if not self.trainable:
            self.module.requires_grad_(False)

    def _make_forward(self) -> Any:
        from engine_plugin_megatron.heads import TokenHead, ValueHead
        from engine_plugin_megatron.pipeline import Pipeline

        self.pipeline = Pipeline(self.models, self.chunks, self.device)
        log.info("%s: %s.", self.context.role, self.ranks.mesh)
        place = (
            self.chunks[-1] if self.ranks.last_stage else None,
            self.device,
            self.ranks.tp,
            self.ranks.tokens,
        )
        if self.context.role in VALUE_ROLES:
            return ValueHead(*place)
        return TokenHead(
            *place,
            vocabulary=self.hf_config.vocab_size,
            rows_at_once=self.options.log_prob_chunk_tokens,
            recompute=self.options.log_prob_recompute,
        )

    @property
    def _compiles(self) -> bool:
        return False

    # -- forward and backward -----------------------------------------------

    def _infer(self, batch: Batch, outputs: Sequence[str], adapter: bool) -> dict[str, Tensor]:
        self._settle()
        plan = self._plan(batch)

        def compute(indices: list[int], micro: Batch, hidden: Tensor) -> dict[str, Tensor]:
            """Return outputs [T] on the CPU from hidden states [T', 1, H] of the last stage."""
            return {name: value.cpu() for name, value in self.forward(micro, hidden, outputs).items()}

        parts = self.pipeline.compute(plan, compute)
        found, offsets = zero_outputs(outputs, batch), batch.offsets.tolist()
        for (indices, _), values in zip(plan, parts, strict=self.ranks.last_stage):
            if indices:
                places = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in indices])
                for name in outputs:
                    found[name][places] = values[name]
        return {name: self.ranks.from_last_stage(value) for name, value in found.items()}

    def forward_backward(self, batch: Batch, loss: LossCall) -> TrainOutput:
        """Accumulate the gradients of a batch through the pipeline; needs weights and gradients on the device."""
        self.store.need("weights", "gradients")
        self._check_outputs((*loss.outputs, *loss.watched))
        return self._accumulate(batch, loss)

    def _accumulate(self, batch: Batch, loss: LossCall) -> TrainOutput:
        objective, steps = self._resolve(loss), self.steps
        if steps is None:
            self._trained()
        assert steps is not None
        total = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}

        def learn(indices: list[int], micro: Batch, hidden: Tensor) -> Tensor:
            """Return the loss, a scalar, from hidden states [T', 1, H]; of a filler, a sum of zeros."""
            outputs = self.forward(micro, hidden, loss.outputs, loss.watched)
            if not indices:
                return torch.stack(
                    [output.sum() for output in outputs.values() if output.requires_grad]
                ).sum()
            value, watched = objective(outputs, micro)
            total.add_(value.detach())
            watched = {name: figure.detach().clone() for name, figure in watched.items()}
            merge(metrics, watched, torch.maximum)
            return value

        plan = self._plan(batch)
        kept = steps.take_gradients()
        self.pipeline.learn(plan, learn)
        steps.give_gradients(kept)
        summed, *values = numbers([total, *metrics.values()], self.device)
        output = self._over_ranks(TrainOutput(summed, dict(zip(metrics, values, strict=True)), len(plan)))
        self.loss_scale.see(output.loss)
        return output

    def _plan(self, batch: Batch) -> list[Micro]:
        """Plan as many micro-batches as the rank that needs most; with `virtual_pp`, fill up to a multiple of `pp`."""
        plan = list(self._micro_batches(batch))
        missing = -len(plan) % self.ranks.mesh.pp if self.ranks.mesh.vp > 1 else 0
        return plan + [([], send_batch(filler(batch), self.device)) for _ in range(missing)]

    @property
    def _tells(self) -> bool:
        return self.ranks.counts

    # -- weights ------------------------------------------------------------

    def _published(self, adapter: bool) -> Iterator[tuple[str, Tensor]]:
        from engine_plugin_megatron.models import weights

        if adapter:
            self._adapted()
        self._settle()
        return weights.stream(self.chunks, self.hf_config)

    def load_named_weights(self, stream: Iterable[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load whole weights (``[OUT, IN]`` of a linear layer); each rank reads the whole stream and keeps its part."""
        from engine_plugin_megatron.models import weights
        from engine_plugin_megatron.reading import FromStream

        self.store.need("weights")
        self._settle()
        read = FromStream(stream, self.shapes, weights.wanted(self.chunks, self.hf_config))
        weights.load(self.chunks, self.hf_config, read, mix)
        read.finish()
        if self.steps is not None:
            self.steps.follow_weights()

    def _settle(self) -> None:
        """Wait for weights whose gather overlaps the next forward pass (`overlap_param_gather`)."""
        if self.steps is not None:
            self.steps.settle()

    # -- optimizer ----------------------------------------------------------

    def optimizer_step(self) -> StepOutput:
        """Clip, step and clear gradients; skip the step on all ranks where the gradient norm is not finite."""
        self.store.need(*PARTS)
        optimizer, lr = self._trained(), self.lr
        assert self.steps is not None
        norm = self.steps.norm()
        skipped = not torch.tensor(norm).isfinite().item()
        if not skipped:
            if self.config.optim.max_grad_norm > 0:
                self.steps.clip(self.config.optim.max_grad_norm, norm)
            self.steps.step(lr)
            optimizer.step()  # has no gradients; the schedule expects a step before its own
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.steps.clear()
        self.num_skipped_steps += skipped
        return StepOutput(norm, lr, skipped, rescaled=self.loss_scale.stepped(skipped))

    def close(self) -> None:
        """Release the model, the optimizer and the process groups."""
        super().close()
        if self.steps is not None:
            self.steps.release()
        self.steps, self.chunks, self.models = None, [], []
        self.__dict__.pop("pipeline", None)
        self.ranks.close()


def _compute_type(options: MegatronOptions, device: torch.device) -> torch.dtype:
    """Return the type of the forward pass; of a role that is not trained, also that of its weights."""
    named = options.compute_dtype
    if named == "auto":
        named = "bf16" if device.type != "cpu" and has_bf16(device) else "fp32"
    return NAMED[named]


def _recomputation(how: str) -> dict[str, Any]:
    """Return megatron-core's config arguments for a value of `recompute`."""
    if how == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if how == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _check_adapter(config: RoleConfig, role: str) -> None:
    if config.lora is not None:
        raise ConfigError(
            f"[{role}.lora]: '{config.backend}' trains no adapters yet: peft's are of transformers' layers, and these are "
            "joined and cut over ranks. Take the table out, or use 'fsdp' or 'torch'."
        )
