"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import Loss, Options

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


class TemplateOptions(Options):
    """``[algorithm.template_name]``: checked when the run file is read, shown by ``engine schema``."""

    strength: float = Field(default=1.0, ge=0)
    """Weight of the squared log-ratio."""


def template_name(
    outputs: Mapping[str, Tensor], batch: Batch, strength: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-r A + strength (log r)^2 / 2``, r the ratio of a token's probability to that of the old policy.

    Args:
        outputs: ``log_probs`` [T] with gradient.
        batch: ``advantages`` [T].
        strength: from the options.

    Returns:
        The loss of each token [T]; metrics [T], whose means are logged as ``actor/NAME``.
    """
    from engine_core.algorithms.losses import old_log_probs

    log_ratio = (outputs["log_probs"] - old_log_probs(outputs, batch)).clamp(-20, 20)
    squared = log_ratio.square() / 2
    return -log_ratio.exp() * batch["advantages"] + strength * squared, {"squared_ratio": squared.detach()}


@hookimpl
def engine_losses() -> Mapping[str, Loss]:
    return {"template_name": Loss(load=template_name, config=TemplateOptions)}
