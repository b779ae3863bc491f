"""Train engines, each with one mistake of state: kept over a load, a change of an option, a sleep or an export."""

import json
import shutil
from pathlib import Path

from engine_plugin_torch.engine import TorchEngine


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
