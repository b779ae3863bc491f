"""The train engine: what differs from the reference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine_plugin_torch.engine import TorchEngine

if TYPE_CHECKING:
    from engine_core.config import OptimConfig


class TemplateName(TorchEngine):
    """The reference engine with SGD and momentum in place of AdamW."""

    def _build_model_optimizer(self, *, optim_config: OptimConfig | None, **given: Any) -> Any:
        """Return the module, or for a trained role ``(module, optimizer, schedule)``."""
        module: nn.Module = super()._build_model_optimizer(optim_config=optim_config, **given)
        if optim_config is None:  # a reference model is not trained
            return module
        module = self._place(module)  # on the device, in the type that is trained
        momentum = self.options.momentum
        return module, torch.optim.SGD(module.parameters(), lr=optim_config.lr, momentum=momentum), None
