"""The loss of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine_core.algorithms.losses import Outputs, TokenLoss
    from engine_core.types import Batch


def value(outputs: Outputs, batch: Batch, *, value_clip: float | None = None) -> TokenLoss:
    """Squared error of the value: one that has moved further than ``value_clip`` towards its target is moved no more.

    Formula: ``max((V - G)^2, (V_old + clip(V - V_old, -e, e) - G)^2) / 2``
    Paper: https://arxiv.org/abs/1707.06347 (the authors' code)

    Args:
        outputs: ``values`` [T], with gradient.
        batch: ``returns`` [T] (G), ``values`` [T] (V_old, before the update).
        value_clip: e, over 0; None is no clip.

    Returns:
        [T] loss, and the metrics ``value_mean``, ``return_mean``, ``clip_fraction``.
    """
    values, returns = outputs["values"], batch["returns"]
    error = (values - returns) ** 2
    clipped = error
    if value_clip is not None:
        old = batch["values"]
        clipped = (old + (values - old).clamp(-value_clip, value_clip) - returns) ** 2
    loss = 0.5 * torch.maximum(error, clipped)
    metrics = {
        "value_mean": values.detach(),
        "return_mean": returns,
        "clip_fraction": (clipped > error).to(loss.dtype),
    }
    return loss, metrics
