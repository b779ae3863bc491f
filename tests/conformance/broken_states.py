"""Train engines, each with one mistake of state: kept over a load, a change of an option, a sleep, an export or what a folder has."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import torch

from engine_core.errors import DataError
from engine_plugin_torch import value_models
from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.value_models import HEAD, reset_head


class KeepsGroups(TorchEngine):
    """Takes ``key`` of the optimizer's groups from the saved run."""

    key = ""

    def save(self, folder):
        done = super().save(folder)
        values = [group[self.key] for group in self.optimizer.param_groups]
        (folder / "groups.json").write_text(json.dumps(values))
        return done

    def load(self, folder):
        super().load(folder)
        for group, value in zip(
            self.optimizer.param_groups, json.loads((folder / "groups.json").read_text()), strict=True
        ):
            self.take(group, value)

    def take(self, group, value):
        group[self.key] = value


class KeepsPeak(KeepsGroups):
    key = "initial_lr"

    def take(self, group, value):
        self.set_lr(value)


class KeepsDecay(KeepsGroups):
    key = "weight_decay"


class KeepsBudget(TorchEngine):
    used = False

    def forward_backward(self, batch, loss):
        self.used = True
        return super().forward_backward(batch, loss)

    def set_token_budget(self, tokens):
        if not self.used:
            super().set_token_budget(tokens)


class DropsGradientsOfSeveral(TorchEngine):
    def sleep(self, keep=()):
        super().sleep(keep)
        if len(keep) > 1:
            self.module.zero_grad(set_to_none=True)


class ExportsOldConfig(TorchEngine):
    def export(self, folder, adapter=False):
        super().export(folder, adapter)
        if not adapter:
            shutil.copy(Path(self.config.path or self.model_config.path) / "config.json", folder)


class NoBuffers(TorchEngine):
    def named_weights(self, to="all", adapter=False):
        learned = dict(self.module.named_parameters())
        return ((n, value) for n, value in super().named_weights(to, adapter) if n in learned)


class FreshHead(TorchEngine):
    def _finish(self, module):
        if hasattr(module, HEAD):
            reset_head(getattr(module, HEAD), 0)
        super()._finish(module)


class DrawsHead(TorchEngine):
    def __init__(self, *args, **kwargs):
        def drawn(head, seed):
            reset_head(head, int(torch.randint(2**30, ())))

        with mock.patch.object(value_models, "reset_head", drawn):
            super().__init__(*args, **kwargs)


class TakesPartMixed(TorchEngine):
    def load_named_weights(self, stream, mix=1.0):
        with contextlib.suppress(DataError) if mix < 1 else contextlib.nullcontext():
            super().load_named_weights(stream, mix)


class CutsAlpha(TorchEngine):
    def _finish(self, module):
        super()._finish(module)
        for layer in self.module.modules():
            if getattr(layer, "scaling", None) and isinstance(layer.scaling, dict):
                layer.scaling["default"] = int(self.config.lora.alpha) / self.config.lora.rank


class KeepsMark(TorchEngine):
    def load(self, folder):
        marked = self.store._random
        super().load(folder)
        self.store._random = marked


class SavingDropsGradients(TorchEngine):
    def save(self, folder):
        done = super().save(folder)
        self.module.zero_grad(set_to_none=True)
        return done


class FirstOptions(TorchEngine):
    def _resolve(self, loss):
        self.known = getattr(self, "known", {})
        return self.known.setdefault(loss.name, super()._resolve(loss))


class FirstTemperature(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        self.temperature = getattr(self, "temperature", micro.temperature)
        return super()._outputs(dataclasses.replace(micro, temperature=self.temperature), grad, watched)


class ShortPositions(TorchEngine):
    def _outputs(self, micro, grad, watched=()):
        self.longest = getattr(self, "longest", int(micro.lengths.max()))
        places = torch.cat([torch.arange(n) for n in micro.lengths.tolist()])
        found = super()._outputs(micro, grad, watched)
        return {n: v * (places < self.longest).view(-1, *[1] * (v.ndim - 1)) for n, v in found.items()}


class MeanOfNothing(TorchEngine):
    def forward_backward(self, batch, loss):
        found = super().forward_backward(batch, loss)
        return found if len(batch) else dataclasses.replace(found, loss=float("nan"))
