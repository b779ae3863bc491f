"""Train engines, each with one mistake of a compute type, a model given from Python, or a call that is stopped."""

import contextlib
import dataclasses

import torch

from engine_plugin_torch import build, value_models
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.value_models import HEAD

# -- compute types ------------------------------------------------------------------


class ComputesInFloat32(TorchEngine):
    @property
    def _compute_dtype(self):
        return torch.float32


class LendsInFloat32(TorchEngine):
    @contextlib.contextmanager
    def generation_module(self):
        with super().generation_module() as module, torch.autocast("cpu", enabled=False):
            yield module


class StreamsInHalf(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        for name, value in super().named_weights(to, adapter):
            yield name, value.to(self._compute_dtype).to(value.dtype)


class StepsInHalf(TorchEngine):
    """Steps start from rounded weights, as those of an engine without float32 copies."""

    def optimizer_step(self):
        step = super().optimizer_step()
        for weight in self._trainable_parameters():
            weight.data = weight.data.to(self._compute_dtype).to(weight.dtype)
        return step


class TakesInHalf(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        super().load_named_weights(((name, v.to(self._compute_dtype).to(v.dtype)) for name, v in stream), mix)


class MergesInHalf(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        for name, value in super().named_weights(to, adapter):
            halved = self.adapter is not None and not adapter and "_proj" in name
            yield name, value.to(self._compute_dtype).to(value.dtype) if halved else value


# -- a model given from Python ------------------------------------------------------


class Given(TorchEngine):
    """``taken(module)`` is what a role gets of a model given from Python."""

    def _build_model_optimizer(self, **arguments):
        live = (self.context.live or {}).get("model")
        if live is None or self.context.role == "actor":
            return super()._build_model_optimizer(**arguments)
        return self.taken(live)

    def taken(self, live):
        if self.context.role == "critic":
            return value_models.with_value_head(live, self.model_config.seed)
        return build.adopt_live(live, self.model_config, self.context.role, self.device)


class SharesDecoder(Given):
    pass


class OtherHead(Given):
    def taken(self, live):
        if self.context.role != "critic":
            return super().taken(live)
        made = value_models.with_value_head(
            build.adopt_live(live, self.model_config, "critic", self.device), 0
        )
        getattr(made, HEAD).weight.data = live.lm_head.weight.data[:1].clone()
        return made


class ReadsFolder(TorchEngine):
    def _build_model_optimizer(self, **arguments):
        if self.context.role == "critic":
            self.context.live and self.context.live.clear()
        return super()._build_model_optimizer(**arguments)


class StaysInTraining(TorchEngine):
    def _adopt(self, built):
        super()._adopt(built)
        self.module.train((self.context.live or {}).get("model") is not None)


# -- a call that is stopped ----------------------------------------------------------


class HalfUntilTheEnd(TorchEngine):
    """The weights are rounded within a call, and come back at its end."""

    def forward_backward(self, batch, loss):
        exact = [weight.detach().clone() for weight in self._trainable_parameters()]
        for weight in self._trainable_parameters():
            weight.data = weight.data.half().float()
        for weight, value in zip(self._trainable_parameters(), exact, strict=True):
            weight.kept = value
        found = super().forward_backward(batch, loss)
        for weight in self._trainable_parameters():
            weight.data = weight.kept
        return found


class MovesScheduleAtBegin(TorchEngine):
    begun = False

    def forward_backward(self, batch, loss):
        if not self.begun:
            self.lr_scheduler.last_epoch += 1
        self.begun = True
        found = super().forward_backward(batch, loss)
        self.lr_scheduler.last_epoch -= 1
        self.begun = False
        return found


class ForgetsScale(TorchEngine):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_scale.state = dict


class NeverLowers(TorchEngine):
    def optimizer_step(self):
        factor = self.loss_scale.factor
        found = super().optimizer_step()
        self.loss_scale.factor = factor
        return found


class HidesOverflow(TorchEngine):
    def optimizer_step(self):
        return dataclasses.replace(super().optimizer_step(), rescaled=False)


class ClipsScaled(TorchEngine):
    def _clip(self, max_norm, norm):
        super()._clip(max_norm, norm * self.loss_scale.factor)
