"""megatron-core's optimizer behind the engine's contract, and its state as whole tensors.

megatron-core's own checkpoints are not used. Loading one into its ``DistributedOptimizer`` with torch's AdamW gives all
parameters one shared step tensor. Each parameter then increments it, so later steps are silently wrong. Here the state
is read and written parameter by parameter, and each parameter gets a separate step tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

if TYPE_CHECKING:
    from engine_core.config import OptimConfig
    from engine_plugin_megatron.options import MegatronOptions
    from engine_plugin_torch.loss_scale import LossScale

MAIN, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""Names of a parameter's state: the float32 copy that is stepped, and AdamW's averages."""


def with_gradients(chunks: Sequence[Any], options: MegatronOptions) -> list[DistributedDataParallel]:
    """Wrap the chunks with gradient buffers that are summed over data-parallel ranks."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.grad_reduce_dtype == "fp32",
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.distributed_optimizer,
    )
    # as in megatron's own training, chunks after the first reduce their gradients in one message, without buckets
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class Steps:
    """The optimizer of a trained role.

    Args:
        models: wrapped chunks, with their first weights.
        options: the role's option table.
        optim: the role's ``optim`` table.
        dtype: type of the weights.
        loss_scale: the factor of the loss, active in fp16.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        options: MegatronOptions,
        optim: OptimConfig,
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> None:
        self.models, self.decay = list(models), optim.weight_decay
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=0.0,  # clipped in ``clip``, with the reported norm
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            loss_scale=loss_scale.factor if loss_scale.active else None,  # constant: changed here
            params_dtype=dtype,
            use_distributed_optimizer=options.distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
        )
        self.optimizer: Any = get_megatron_optimizer(config, self.models, use_gloo_process_groups=False)
        self.loss_scale = loss_scale
        for model in self.models if loss_scale.active else ():
            model.config.grad_scale_func = loss_scale.scaled
        self.count = 0  # steps taken
        self.holds_gradients = False

    # -- a step ---------------------------------------------------------------

    def norm(self) -> float:
        """Return the norm of the whole gradient over all ranks, after preparing gradients for the step. Collective.

        In fp16 gradients are first divided by the loss scale. Dense weights and experts share one scale here.
        megatron-core keeps one each, and an overflow in one would leave the other, which multiplies the loss,
        unchanged.
        """
        for inner in self._inner() if self.loss_scale.active else ():
            inner.grad_scaler._scale.fill_(self.loss_scale.factor)
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def clip(self, most: float, norm: float) -> None:
        """Scale the gradient to a norm of at most ``most``."""
        for inner in self._inner():
            parameters = inner.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, most, norm)

    def step(self, lr: float) -> None:
        """Take a step with the learning rate ``lr``. Vectors have no weight decay, as in the core's own AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.count += 1

    def clear(self) -> None:
        """Set all gradients to 0."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.holds_gradients = False

    def settle(self) -> None:
        """Wait for weights that are gathered in the background (`overlap_param_gather`)."""
        for model in self.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)

    # -- gradients of several calls -------------------------------------------

    def take_gradients(self) -> list[Tensor]:
        """Return and clear the gradients that earlier calls have already reduced, so that they are not reduced twice.

        Returns:
            Flat buffers ``[N]``, one per gradient buffer; none where nothing is accumulated.
        """
        if not self.holds_gradients:
            return []
        kept = [buffer.grad_data.clone() for buffer in self._buffers()]
        self.clear()
        return kept

    def give_gradients(self, kept: Sequence[Tensor]) -> None:
        """Add the flat buffers ``[N]`` of ``take_gradients`` to the gradients of this call."""
        for buffer, values in zip(self._buffers(), kept, strict=True) if kept else ():
            buffer.grad_data.add_(values)
        self.holds_gradients = True

    def release(self) -> None:
        """Free weights and gradients. Must be the last call.

        Hooks on the weights' autograd nodes reference the wrapped model, and its layers reference the nodes through
        saved tensors (the probabilities of experts). This reference cycle passes through C++, which Python's garbage
        collector does not see.
        """
        for model in self.models:
            for handle in model.remove_forward_pre_hook_handles.values():
                handle.remove()
            for parameter in model.parameters():
                parameter.main_grad = None
                parameter.data = parameter.new_empty(0)
            model.config.no_sync_func = model.config.grad_scale_func = None
            model.__dict__.clear()
        self.models = []

    def _buffers(self) -> Iterator[Any]:
        for model in self.models:
            yield from (*model.buffers, *model.expert_parallel_buffers)

    # -- state ----------------------------------------------------------------

    def read(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Return one whole state tensor of a parameter, on every rank that holds the parameter. Collective.

        Args:
            parameter: a parameter of this rank's chunks.
            key: ``MAIN`` or one of ``MOMENTS``; an average is 0 before the first step.

        Returns:
            Float32, in the shape of this rank's parameter (``[OUT, IN]`` of a linear layer, cut by tensor parallelism).
        """
        inner = self._owner(parameter)
        if not isinstance(inner, DistributedOptimizer):
            return self._held(inner, parameter, key)
        found = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if span := _span(inner, parameter):
            found[span] = self._held(inner, parameter, key).flatten()
        dist.all_reduce(found, group=inner.data_parallel_group)
        return found.view_as(parameter)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, key: str, values: Tensor) -> None:
        """Store this rank's part of a state tensor; ``MAIN`` also sets the parameter itself.

        Args:
            parameter: a parameter of this rank's chunks.
            key: ``MAIN`` or one of ``MOMENTS``.
            values: the tensor in the parameter's shape (``[OUT, IN]``), as ``read`` returns it.
        """
        inner = self._owner(parameter)
        if isinstance(inner, DistributedOptimizer):
            span = _span(inner, parameter)
            if span:
                self._held(inner, parameter, key).view(-1).copy_(values.flatten()[span])
        else:
            self._held(inner, parameter, key).copy_(values)
        if key == MAIN:
            parameter.copy_(values)

    def restart(self, count: int) -> None:
        """Reset the state to ``count`` steps, with averages of 0 to be overwritten; 0 steps: no state, as when new."""
        self.count = count
        for inner in self._inner():
            inner.optimizer.state.clear()
            for group in inner.optimizer.param_groups:
                group.pop("step", None)
                if count:
                    # fused optimizers keep the count in the group, torch's per parameter
                    group["step"] = count
                for parameter in group["params"] if count else ():
                    inner.optimizer.state[parameter] = {
                        "step": torch.tensor(float(count)),
                        **{key: torch.zeros_like(parameter) for key in MOMENTS},
                    }

    def follow_weights(self) -> None:
        """Copy newly loaded weights into their float32 copies."""
        self.optimizer.reload_model_params()

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's state tensors and float32 copies: flat parts [N], or unsharded e.g. [OUT, IN]."""
        for inner in self._inner():
            for group in inner.optimizer.param_groups:
                yield from group["params"]
            for values in inner.optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, Tensor) and value.ndim)

    def gradient_buffers(self) -> list[Tensor]:
        """Return this rank's gradient buffers, flat ``[N]`` each."""
        return [buffer.grad_data for buffer in self._buffers()]

    def _held(self, inner: Any, parameter: nn.Parameter, key: str) -> Tensor:
        """Return this rank's part as a view; zeros for an average that does not exist yet."""
        if isinstance(inner, DistributedOptimizer):
            group, place = inner.model_param_group_index_map[parameter]
            main = inner.optimizer.param_groups[group]["params"][place]
        else:
            main = getattr(parameter, "main_param", parameter)
        if key == MAIN:
            return main.detach()
        return inner.optimizer.state.get(main, {}).get(key, torch.zeros_like(main))

    def _inner(self) -> list[Any]:
        """Return the optimizers of dense weights and of experts, without those that have no weight on this rank."""
        return [part for part in self.optimizer.chained_optimizers if part.optimizer is not None]

    def _owner(self, parameter: nn.Parameter) -> Any:
        expert = not getattr(parameter, "allreduce", True)
        return self.optimizer.chained_optimizers[int(expert)]


def _span(inner: DistributedOptimizer, parameter: nn.Parameter) -> slice | None:
    """Return the range of a parameter's flattened values that this rank updates, or None."""
    if parameter not in inner.model_param_group_index_map:
        return None
    span = inner._get_model_param_range_map(parameter)["param"]
    return slice(span.start, span.end)
