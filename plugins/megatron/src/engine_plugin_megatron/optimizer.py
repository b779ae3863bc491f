"""megatron-core's optimizer with the promises of the contract, and its state as whole tensors.

Its own checkpoints are not used. Loading one of its ``DistributedOptimizer`` with torch's AdamW gives all parameters one
tensor for their step count, which then grows once for each of them: later steps are wrong, and nothing tells. Here the
state is read and written parameter by parameter, and each gets a count of its own.
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

from engine_plugin_torch.loss_scale import LossScale

if TYPE_CHECKING:
    from engine_core.config import OptimConfig
    from engine_plugin_megatron.options import MegatronOptions

MAIN, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""Names of a parameter's state: the float32 copy that is stepped, and AdamW's averages."""


def with_gradients(chunks: Sequence[Any], options: MegatronOptions) -> list[DistributedDataParallel]:
    """The chunks with buffers for their gradients, which are summed over data-parallel ranks."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.grad_reduce_dtype == "fp32",
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.distributed_optimizer,
        bucket_size=options.bucket_size,
    )
    # in a pipeline the buckets of all chunks but the first are summed in one message, as megatron's own training does
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class Steps:
    """Takes optimizer steps.

    Args:
        models: wrapped chunks, with their first weights.
        options: the role's table.
        optim: the role's ``optim`` table.
        dtype: of the weights.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        options: MegatronOptions,
        optim: OptimConfig,
        dtype: torch.dtype,
    ) -> None:
        self.models, self.decay = list(models), optim.weight_decay
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=0.0,  # clipped here, with the norm that is told
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            loss_scale=options.loss_scale if dtype == torch.float16 else None,  # constant: it is changed here
            params_dtype=dtype,
            use_distributed_optimizer=options.distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
        )
        self.optimizer: Any = get_megatron_optimizer(config, self.models, use_gloo_process_groups=False)
        self.loss_scale = LossScale(options.loss_scale) if dtype == torch.float16 else None
        for model in self.models if self.loss_scale is not None else ():
            model.config.grad_scale_func = self.scaled
        self.count = 0  # steps taken
        self.holds_gradients = False

    # -- a step ---------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """What goes backward in fp16."""
        assert self.loss_scale is not None
        return loss * self.loss_scale.factor

    def norm(self) -> float:
        """The norm of the whole gradient over all ranks; it is made ready for a step. Collective.

        In fp16 gradients are divided by the scale of the loss before. Dense weights and experts share one: megatron-core's own
        scale is one for each, and what overflows in the one would not change the other, by which the loss is multiplied.
        """
        for inner in self._inner() if self.loss_scale is not None else ():
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
        """Take one, with this rate. Vectors do not decay, as in the core's own AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.count += 1

    def clear(self) -> None:
        """Gradients are 0 again."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.holds_gradients = False

    def settle(self) -> None:
        """Weights that are gathered in the background (`overlap_param_gather`) are there."""
        for model in self.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)

    # -- gradients of several calls -------------------------------------------

    def take_gradients(self) -> list[Tensor]:
        """What earlier calls have summed over ranks already, put aside: summed once more it would count twice."""
        if not self.holds_gradients:
            return []
        kept = [buffer.grad_data.clone() for buffer in self._buffers()]
        self.clear()
        return kept

    def give_gradients(self, kept: Sequence[Tensor]) -> None:
        """Add what was put aside to what a call has brought."""
        for buffer, values in zip(self._buffers(), kept, strict=True) if kept else ():
            buffer.grad_data.add_(values)
        self.holds_gradients = True

    def release(self) -> None:
        """Let go of weights and gradients; nothing is called after it.

        A wrapped model is held by hooks of its weights' autograd nodes, and the nodes by what its layers remember of their last
        call (the probabilities of experts). Such a circle leads through C++, where Python's collector does not go.
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
        """The whole of one tensor of a parameter's state, on every rank that holds the parameter. Collective.

        Args:
            key: of ``MAIN`` and ``MOMENTS``; an average is 0 before the first step.
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
        """The inverse of ``read``: this rank's part of a whole tensor. Of ``MAIN`` the weights themselves follow."""
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
        """State as after ``count`` steps, its tensors to be written; as new where that is 0."""
        self.count = count
        for inner in self._inner():
            inner.optimizer.state.clear()
            for group in inner.optimizer.param_groups:
                group.pop("step", None)
                if count:
                    # where fused optimizers have it; torch's has one for each parameter
                    group["step"] = count
                for parameter in group["params"] if count else ():
                    inner.optimizer.state[parameter] = {
                        "step": torch.tensor(float(count)),
                        **{key: torch.zeros_like(parameter) for key in MOMENTS},
                    }

    def follow_weights(self) -> None:
        """The float32 copies follow weights that came from elsewhere."""
        self.optimizer.reload_model_params()

    def tensors(self) -> Iterator[Tensor]:
        """Of the state on this rank, the float32 copies too."""
        for inner in self._inner():
            for group in inner.optimizer.param_groups:
                yield from group["params"]
            for values in inner.optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, Tensor) and value.ndim)

    def gradient_buffers(self) -> list[Tensor]:
        """What holds gradients on this rank."""
        return [buffer.grad_data for buffer in self._buffers()]

    def _held(self, inner: Any, parameter: nn.Parameter, key: str) -> Tensor:
        """This rank's part, a view."""
        if isinstance(inner, DistributedOptimizer):
            group, place = inner.model_param_group_index_map[parameter]
            main = inner.optimizer.param_groups[group]["params"][place]
        else:
            main = getattr(parameter, "main_param", parameter)
        if key == MAIN:
            return main.detach()
        return inner.optimizer.state.get(main, {}).get(key, torch.zeros_like(main))

    def _inner(self) -> list[Any]:
        """One of the weights that data-parallel ranks share, one of experts; those without a weight here left out."""
        return [part for part in self.optimizer.chained_optimizers if part.optimizer is not None]

    def _owner(self, parameter: nn.Parameter) -> Any:
        expert = not getattr(parameter, "allreduce", True)
        return self.optimizer.chained_optimizers[int(expert)]


def _span(inner: DistributedOptimizer, parameter: nn.Parameter) -> slice | None:
    """Which values of a parameter this rank steps."""
    if parameter not in inner.model_param_group_index_map:
        return None
    span = inner._get_model_param_range_map(parameter)["param"]
    return slice(span.start, span.end)
