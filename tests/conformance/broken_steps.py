"""Train engines, each with one mistake of a schedule, a gradient, the options of a loss, clipping, state or a mixture."""

import math

import torch
from broken_runs import Outputs

from engine_core.types import LossCall
from engine_plugin_torch.checkpoint import StateStore
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.optimizers import set_peak_lr

# -- schedules --------------------------------------------------------------------


class Scheduled(TorchEngine):
    """``rate(step, whole)`` replaces the share of the peak rate; ``whole(step)`` is the right one."""

    def _finish(self, module):
        super()._finish(module)
        if self.lr_scheduler is not None:
            (whole, *_) = self.lr_scheduler.lr_lambdas
            self.lr_scheduler.lr_lambdas = [lambda step: self.rate(step, whole)] * len(
                self.optimizer.param_groups
            )
            for group, peak in zip(self.optimizer.param_groups, self.lr_scheduler.base_lrs, strict=True):
                group["lr"] = peak * self.rate(0, whole)

    @property
    def optim(self):
        return self.config.optim

    @property
    def end(self):
        return self.optim.decay_steps or self.context.total_steps


class NoWarmup(Scheduled):
    def rate(self, step, whole):
        return 1.0 if self.optim.schedule == "constant" else whole(step)


class NoFloor(Scheduled):
    def rate(self, step, whole):
        least = self.optim.min_lr_ratio
        late = self.optim.schedule != "constant" and step >= self.optim.warmup_steps
        return (whole(step) - least) / (1 - least) if late else whole(step)


class DecaysInWarmup(Scheduled):
    def rate(self, step, whole):
        if self.optim.schedule != "linear" or step < self.optim.warmup_steps:
            return whole(step)
        least = self.optim.min_lr_ratio
        return least + (1 - least) * max(0.0, 1 - step / self.end)


class RisesAfterCosine(Scheduled):
    def rate(self, step, whole):
        if self.optim.schedule != "cosine" or step <= self.end:
            return whole(step)
        done = (step - self.optim.warmup_steps) / (self.end - self.optim.warmup_steps)
        least = self.optim.min_lr_ratio
        return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2


class ScheduleOfMicroBatches(TorchEngine):
    def forward_backward(self, batch, loss):
        found = super().forward_backward(batch, loss)
        for _ in range(found.num_micro_batches - 1):
            self.lr_scheduler.step()
        return found


class PeakEndsWarmup(TorchEngine):
    def set_lr(self, lr):
        set_peak_lr(self.optimizer, self.lr_scheduler, lr)
        self.lr_scheduler.last_epoch = max(self.lr_scheduler.last_epoch, self.config.optim.warmup_steps)


class Retries(TorchEngine):
    """``undo`` is called before a call that ran out of memory is tried again."""

    def forward_backward(self, batch, loss):
        try:
            return super()._accumulate(batch, loss)
        except torch.OutOfMemoryError:
            self.undo()
            return super()._accumulate(batch, loss)


class RetryDropsAll(Retries):
    def undo(self):
        self.module.zero_grad(set_to_none=True)


class RetryAddsTwice(Retries):
    def undo(self):
        pass


# -- gradients of outputs ----------------------------------------------------------


class EntropyTooSteep(Outputs):
    def changed(self, name, value, micro):
        still = value.detach()
        return still + micro.temperature * (value - still) if name == "entropy" else value


class SquaresDetached(Outputs):
    def changed(self, name, value, micro):
        return value.detach() if name == "sum_pi_squared" else value


class CandidatesDetached(Outputs):
    def changed(self, name, value, micro):
        return value.detach() if name == "log_probs_at" else value


class FirstCandidate(Outputs):
    def changed(self, name, value, micro):
        if name != "log_probs_at":
            return value
        return torch.cat([value[:, :1], value[:, 1:].detach()], dim=1)


class StillSum(TorchEngine):
    """The log of the sum over the support is a constant."""

    def _outputs(self, micro, grad, watched=()):
        found = super()._outputs(micro, grad, watched)
        if "support_ids" in micro and "log_probs" in grad:
            kept = (micro["support_ids"] >= 0).any(-1)
            rows = super()._outputs(
                micro.with_columns({"candidate_ids": micro["support_ids"].clamp(min=0).long()}),
                ("log_probs_at",),
            )["log_probs_at"]
            rows = rows.masked_fill(micro["support_ids"] < 0, -torch.inf)
            total = torch.where(kept, torch.where(kept[:, None], rows, 0.0).logsumexp(-1), 0.0)
            found["log_probs"] = found["log_probs"] + total - total.detach()
        return found


class StillWhole(Outputs):
    def changed(self, name, value, micro):
        if name != "log_probs" or "support_ids" not in micro:
            return value
        return torch.where((micro["support_ids"] >= 0).any(-1), value, value.detach())


# -- options of the policy's objective ----------------------------------------------


class Called(TorchEngine):
    """``changed(parameters)`` changes those of the objective."""

    def _resolve(self, loss):
        return super()._resolve(
            LossCall(loss.name, self.changed(dict(loss.parameters)), loss.outputs, loss.watched)
        )


class NoLossOptions(Called):
    def changed(self, parameters):
        return {**parameters, "loss_options": {}} if "loss_options" in parameters else parameters


class Without(Called):
    left_out = ""

    def changed(self, parameters):
        return {name: value for name, value in parameters.items() if name != self.left_out}


class NoBonus(Without):
    left_out = "entropy_coef"


class NoKL(Without):
    left_out = "kl_coef"


class NoCorrection(Without):
    left_out = "correction"


# -- clipping ------------------------------------------------------------------------


class ClipsEarly(TorchEngine):
    def _clip(self, max_norm, norm):
        super()._clip(0.99 * max_norm if norm < max_norm else max_norm, norm)


class RootOfAConstant(TorchEngine):
    def _grad_norm(self):
        return (super()._grad_norm() ** 2 + 1e-12).sqrt()


class CutsGradients(TorchEngine):
    def _grad_norm(self):
        for grad in self._grads():
            grad.clamp_(-1e6, 1e6)
        return super()._grad_norm()


class HalfFactor(TorchEngine):
    def _clip(self, max_norm, norm):
        factor = (max_norm / norm).clamp(max=1.0).half().float()
        for grad in self._grads():
            grad *= factor


# -- skipped steps, state, mixtures, the rest of candidates -------------------------


class ScheduleOfSkipped(TorchEngine):
    def optimizer_step(self):
        found = super().optimizer_step()
        if found.skipped:
            self.lr_scheduler.step()
        return found


class KeepsFinite(TorchEngine):
    def optimizer_step(self):
        kept = [
            None if p.grad is None else p.grad.nan_to_num(0.0, 0.0, 0.0) for p in self._trainable_parameters()
        ]
        found = super().optimizer_step()
        if found.skipped:
            for parameter, gradient in zip(self._trainable_parameters(), kept, strict=True):
                parameter.grad = gradient
        return found


class ForgetsDecay(TorchEngine):
    def load(self, folder):
        fresh = self.lr_scheduler.state_dict()
        super().load(folder)
        if not self.config.optim.warmup_steps:
            self.lr_scheduler.load_state_dict(fresh)
            self.set_lr(self.config.optim.lr)


class Unmarked(StateStore):
    def mark(self):
        pass


class IgnoresMark(TorchEngine):
    store_class = Unmarked


class ReplacesVectors(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        given = dict(stream)
        super().load_named_weights(given.items(), mix)
        vectors = {name: value for name, value in given.items() if value.ndim < 2}
        whole = {name: value.clone() for name, value in self.named_weights()}
        super().load_named_weights({**whole, **vectors}.items())


class ForgetsAdapter(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        if self.adapter is not None and mix != 1.0:
            self.adapter._begin_again()
        super().load_named_weights(stream, mix)


class RestOfSum(Outputs):
    def changed(self, name, value, micro):
        if name != "log_rest":
            return value
        rest = torch.log1p(-(-torch.expm1(value)).clamp(max=1.0))
        return rest.clamp(min=-1e4)


# -- a scale at the end of a step ---------------------------------------------------


class ScalesLastCall(TorchEngine):
    def forward_backward(self, batch, loss):
        self.earlier = [grad.clone() for grad in self._grads()]
        return super().forward_backward(batch, loss)

    def scale_gradients(self, factor):
        super().scale_gradients(factor)
        for grad, earlier in zip(self._grads(), self.earlier, strict=True):
            grad.add_(earlier, alpha=1 - factor)


class KeepsLateScale(TorchEngine):
    late = 1.0

    def scale_gradients(self, factor):
        self.late = factor

    def optimizer_step(self):
        super().scale_gradients(self.late)
        return super().optimizer_step()


class MovesBetweenCalls(TorchEngine):
    def forward_backward(self, batch, loss):
        found = super().forward_backward(batch, loss)
        with torch.no_grad():
            for weight in self._trainable_parameters():
                weight.mul_(1.0001)
        return found
