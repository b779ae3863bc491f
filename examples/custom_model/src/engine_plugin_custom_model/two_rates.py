"""Two parameter groups, by the one method that every engine has; no engine is known here."""

import torch

from engine_plugin_torch.engine import TorchEngine
from engine_plugin_torch.optimizers import build_schedule


class TwoRates:
    """Before an engine among the bases: norms and biases learn at a separate rate, and do not decay."""

    def _build_model_optimizer(self, *, optim_config, role, **rest):
        module = super()._build_model_optimizer(optim_config=optim_config, role=role, **rest)
        if optim_config is None:  # a reference model is not trained: the engine continues alone
            return module
        module = self._distribute(module)  # placed, wrapped, sharded: the parameters that are trained here
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
        lr = optim_config.lr
        groups = [
            {"params": matrices, "weight_decay": optim_config.weight_decay},
            {"params": vectors, "lr": lr * self.options.vector_rate, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=optim_config.betas, eps=optim_config.eps)
        return module, optimizer, build_schedule(optimizer, optim_config, self.context.total_steps, role)


class TwoRatesTorch(TwoRates, TorchEngine):
    """In one process."""
