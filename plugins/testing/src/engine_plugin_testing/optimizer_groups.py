"""An optimizer with several groups of parameters, which the kit builds by ``engine_build_optimizer`` as a plugin of a run does."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from engine_core import hookimpl
from engine_core.plugins.plugin_set import Plugin
from engine_plugin_testing.reference import rate_of

if TYPE_CHECKING:
    from torch import nn

    from engine_core.plugins.plugin_set import PluginSet

HOOK = "engine_build_optimizer"


class Groups:
    """Three sets of weights, each with its share of the peak learning rate.

    Args:
        shares: one for each set, relative to the largest; that should not be the first, whose group is the optimizer's first.

    Attributes:
        asked: whether an engine has called the hook. An engine that builds its own optimizer does not.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares, self.asked = shares, False  #: constructor argument
        self.most = 1.0  # the largest share of the sets that the model has

    def share_of(self, name: str) -> float:
        """Return the share of a weight's rate, by its name in a module or in a folder."""
        return self.shares[_set_of(name, len(self.shares))] / self.most if self.asked else 1.0

    def add_to(self, plugins: PluginSet) -> None:
        """Add the hook to the plugins of one engine."""
        module = ModuleType("engine_plugin_testing_groups")
        setattr(module, HOOK, self.engine_build_optimizer)
        plugins.manager.register(module, module.__name__)
        plugin = Plugin(module, "the kit", "the kit", "")
        plugins.plugins.append(plugin)
        plugins.named.append(plugin)

    @hookimpl
    def engine_build_optimizer(
        self, module: nn.Module, optim_config: Any
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """Build AdamW and the schedule of ``[actor.optim]``; the default but for the shares."""
        self.asked = True
        members: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                key = _set_of(name, len(self.shares)), parameter.ndim >= 2
                members.setdefault(key, []).append(parameter)
        self.most = max(self.shares[number] for number, _ in members)
        optim = optim_config.model_dump()
        groups = [
            {
                "params": found,
                "lr": optim["lr"] * (self.shares[number] / self.most),
                "weight_decay": optim["weight_decay"] * matrix,
            }
            for (number, matrix), found in sorted(members.items(), key=lambda item: item[0])
        ]
        optimizer = torch.optim.AdamW(groups, betas=optim["betas"], eps=optim["eps"])
        return optimizer, LambdaLR(optimizer, lambda step: rate_of({**optim, "lr": 1.0}, step, 0))


def _set_of(name: str, count: int) -> int:
    """Return the number of a weight's set: by the end of its name, which wrappers and adapters leave as it is."""
    end = ".".join(re.sub(r"\.(default|lora_A|lora_B)\b", "", name).split(".")[-2:])
    return zlib.crc32(end.encode()) % count
