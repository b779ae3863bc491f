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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine_core.errors import did_you_mean
from engine_core.metrics import merge
from engine_core.packing import plan_micro_batches
from engine_core.types import StepOutput, TrainOutput
from engine_plugin_torch.checkpoint import PARTS, TorchState
from engine_plugin_torch.collectives import measure
from engine_plugin_torch.log_probs import zero_outputs
from engine_plugin_torch.transfer import Fetched, numbers, on_host, send_batch
from engine_plugin_torch.weights import published_weights, take_weights, to_own_names

if TYPE_CHECKING:
    from engine_core.types import Batch, LossCall


log = logging.getLogger("engine")
Result = TypeVar("Result")


class TorchEngine(TorchState):
    """See ``TrainEngine``; how it is built ``TorchBuild``, what it keeps ``TorchState``."""

    # -- forward and backward -----------------------------------------------

    def measure_collectives(self, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
        return measure(self.communicators(), self.device, sizes, repeats)

    def infer(self, batch: Batch, outputs: Sequence[str], adapter: bool = True) -> dict[str, Tensor]:
        self._need("weights")
        self._check_outputs(outputs)
        return self._in_memory(batch, functools.partial(self._infer, batch, outputs, adapter))

    def _infer(self, batch: Batch, outputs: Sequence[str], adapter: bool) -> dict[str, Tensor]:
        """One pass over the micro-batches of a batch."""
        found, fetched = zero_outputs(outputs, batch), Fetched(self.device)
        parts: list[tuple[Tensor, dict[str, Tensor]]] = []
        offsets = batch.offsets.tolist()
        # A compiled forward rounds otherwise without gradient than with it, and a ratio of 1 must be exactly 1.
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
        self._need("weights", "gradients")
        self._check_outputs((*loss.outputs, *loss.watched))
        if self._grads():  # a second try would add to what an earlier call left
            return self._accumulate(batch, loss)
        once = functools.partial(self._accumulate, batch, loss)
        return self._in_memory(batch, once, functools.partial(self.module.zero_grad, set_to_none=True))

    def _in_memory(
        self, batch: Batch, run: Callable[[], Result], undo: Callable[[], None] | None = None
    ) -> Result:
        """``run()``; where the device has no memory for it once more, with half the token budget.

        Args:
            undo: takes back what a failed try has left.
        """
        while True:
            try:
                return run()
            except torch.OutOfMemoryError as error:
                if not self._halve_budget(batch, error):
                    raise
            if undo is not None:
                undo()
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()

    def _halve_budget(self, batch: Batch, error: Exception) -> bool:
        """Half the token budget from here on, where one process is alone and a micro-batch can be smaller."""
        budget = min(self.token_budget, batch.num_tokens)
        if self.layout.dp_size > 1 or budget <= int(batch.lengths.max()):
            return False
        self.set_token_budget(budget // 2)
        log.warning(
            "Out of memory with %d tokens in a micro-batch; going on with %d. "
            "Set %s.max_tokens_per_rank = %d to begin there. (%s)",
            budget,
            budget // 2,
            self.context.role,
            budget // 2,
            str(error).partition("\n")[0][:120],
        )
        return True

    def _accumulate(self, batch: Batch, loss: LossCall) -> TrainOutput:
        """One pass over the micro-batches of a mini-batch."""
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
        return self._over_ranks(TrainOutput(summed, dict(zip(metrics, values, strict=True)), count))

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """The plan of a batch, the same for ``infer`` and ``forward_backward``: positions, sequences.

        An engine whose ranks must all run the same number fills up with ``[]`` and any sequences, which
        add nothing to results, gradients and metrics.
        """
        together = None if batch.keep_together is None else batch.keep_together.tolist()
        for indices in plan_micro_batches(batch.lengths.tolist(), self.token_budget, together):
            yield indices, send_batch(batch.select(indices), self.device)

    def _outputs(self, micro: Batch, grad: Sequence[str], watched: Sequence[str] = ()) -> dict[str, Tensor]:
        """[T] each, or [T, K]. No forward pass where nothing is learned: the outputs are 0."""
        if not bool(on_host(micro["loss_mask"]).any()):
            return zero_outputs((*grad, *watched), micro, self.device)
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

    def _over_ranks(self, output: TrainOutput) -> TrainOutput:
        """Loss and metrics of the whole batch, from those of this rank's share."""
        return output

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

    def _grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients, the same on every rank."""
        return get_total_norm(self._grads())

    def _clip(self, max_norm: float, norm: Tensor) -> None:
        clip_grads_with_norm_(self._trainable_parameters(), max_norm, norm)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._trainable_parameters() if p.grad is not None]

    # -- weights ------------------------------------------------------------

    def adapter_config(self) -> bytes:
        return self._adapted().config_file()

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
