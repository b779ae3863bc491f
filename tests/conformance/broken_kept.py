"""Train engines, each with one mistake about what is kept: rates of groups, marks, files, options, outputs, memory."""

import contextlib
import json
from unittest import mock

import torch
from broken_states import KeepsGroups
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine_core.errors import DataError
from engine_plugin_torch import lora, model_loading
from engine_plugin_torch.checkpoint import StateStore
from engine_plugin_torch.engine import TorchEngine

HELD = []


class PeakOfFirst(TorchEngine):
    """Takes the first group's rate for the largest."""

    def _adopt(self, built):
        super()._adopt(built)
        if self.trainable:
            self.share = self.optimizer.param_groups[0]["initial_lr"] / self.config.optim.lr

    def set_lr(self, lr):
        super().set_lr(lr / self.share)


class KeepsBetas(KeepsGroups):
    key = "betas"

    def save(self, folder):
        return super().save(folder) if self.trainable else TorchEngine.save(self, folder)

    def load(self, folder):
        super().load(folder) if self.trainable else TorchEngine.load(self, folder)


class FirstMark(StateStore):
    def mark(self):
        if self._random is None:
            super().mark()


class KeepsFirstMark(TorchEngine):
    store_class = FirstMark


class LearnsNoEnds(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        mask = micro["loss_mask"] & (micro.token_ids != 1)
        return super()._outputs(micro.with_columns({"loss_mask": mask}), grad, watched)


class EmptiesHostCopy(TorchEngine):
    """Copies weights to the host in each sleep, also where they sleep already."""

    host = None

    def sleep(self, keep=()):
        super().sleep(keep)
        if "weights" in self.store.asleep:
            self.host = [weight.data for weight in self.module.parameters()]
            for weight in self.module.parameters():
                weight.data = torch.zeros_like(weight)

    def wake(self, only=None):
        slept = "weights" in self.store.asleep
        super().wake(only)
        if slept and "weights" not in self.store.asleep:
            for weight, held in zip(self.module.parameters(), self.host, strict=True):
                weight.data = held


class ScalesLaterCalls(TorchEngine):
    late = 1.0

    def scale_gradients(self, factor):
        self.late *= factor

    def optimizer_step(self):
        super().scale_gradients(self.late)
        self.late = 1.0
        return super().optimizer_step()


class FreezesLent(TorchEngine):
    """Freezes the module while it is lent, and for ever if its borrower fails."""

    @contextlib.contextmanager
    def generation_module(self):
        trained = self._trainable_parameters()
        with super().generation_module() as module:
            module.requires_grad_(False)
            yield module
        for parameter in trained:
            parameter.requires_grad_(True)


class TakesParameters(TorchEngine):
    def _resolve(self, loss):
        made = super()._resolve(loss)
        loss.parameters.clear()
        return made


class TurnsTeacher(TorchEngine):
    def forward_backward(self, batch, loss):
        found = super().forward_backward(batch, loss)
        for name in {"actor/teacher_gap"} & found.metrics.keys():
            found.metrics[name] *= -1
        return found


class TakesFrozen(TorchEngine):
    def load(self, folder):
        try:
            super().load(folder)
        except DataError as error:
            if "not trained" not in str(error):
                raise


class StartsOptimizer(TorchEngine):
    def load(self, folder):
        file = folder / "state.json"
        trained = file.exists() and '"optimizer"' in file.read_text()
        lacks = trained and not (folder / "optimizer.safetensors").exists()
        with contextlib.suppress(DataError) if lacks else contextlib.nullcontext():
            super().load(folder)


class KeepsWeightsOfCut(TorchEngine):
    def load(self, folder):
        try:
            super().load(folder)
        except DataError:
            with contextlib.suppress(FileNotFoundError):
                try:
                    load_file(folder / "weights.safetensors")
                except SafetensorError:
                    return
            raise


class ExportsOtherType(TorchEngine):
    def export(self, folder, adapter=False):
        super().export(folder, adapter)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


class DrawsMissing(TorchEngine):
    def __init__(self, *args, **kwargs):
        with mock.patch.object(model_loading, "_refuse_unfit", return_value=None):
            super().__init__(*args, **kwargs)


class OneResult(TorchEngine):
    def infer(self, batch, outputs, adapter=True):
        kept = self.__dict__.setdefault("kept", {})
        found = super().infer(batch, outputs, adapter)
        return {name: kept.setdefault((name, v.shape), v).copy_(v) for name, v in found.items()}


class OverwritesStream(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        self.streamed = getattr(self, "streamed", [])
        for name, value in super().named_weights(to, adapter):
            self.streamed.append(value.clone())
            yield name, self.streamed[-1]

    def infer(self, batch, outputs, adapter=True):
        for value in getattr(self, "streamed", ()):
            value.zero_()
        return super().infer(batch, outputs, adapter)


class OnAgainInside(TorchEngine):
    @contextlib.contextmanager
    def without_adapter(self):
        self.adapter._is_off = False
        with super().without_adapter():
            yield


class EndsOfNames(TorchEngine):
    def __init__(self, *args, **kwargs):
        with mock.patch.object(lora, "_is_end", lambda end, name: name.endswith(end)):
            super().__init__(*args, **kwargs)


class KeepsClosed(TorchEngine):
    def close(self):
        HELD.append(self.module)
        super().close()


class KeepsMomentsClosed(TorchEngine):
    def close(self):
        HELD.extend(v for state in self.optimizer.state.values() for v in state.values())
        super().close()


class IgnoresOverride(TorchEngine):
    def _build_model_optimizer(self, *, role, override_model_config, **more):
        kept = {} if role == "critic" else override_model_config
        return super()._build_model_optimizer(role=role, override_model_config=kept, **more)
