"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import Advantage, Options

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


class TemplateOptions(Options):
    """``[algorithm.template_name]``: checked when the run file is read, shown by ``engine schema``."""

    quantile: float = Field(default=0.5, ge=0, le=1)
    """The baseline of a group is this quantile of its rewards; 0.5: the median."""


def template_name(batch: Batch, quantile: float) -> Tensor:
    """Return ``A = R - q``, q the quantile of the rewards of the group.

    Args:
        batch: ``rewards``, ``group_ids``, ``valid`` [B]; ``loss_mask`` [T].
        quantile: from the options.

    Returns:
        [T] float32: a rollout's value on its sampled tokens, 0 elsewhere and for rollouts that are not valid.
    """
    rewards, valid, groups = batch["rewards"], batch["valid"], batch["group_ids"]
    values = rewards.new_zeros(len(batch))
    for group in groups.unique():
        members = (groups == group) & valid
        if members.any():
            values[members] = rewards[members] - rewards[members].quantile(quantile)
    return batch.to_tokens(values) * batch["loss_mask"]


@hookimpl
def engine_advantages() -> Mapping[str, Advantage]:
    return {"template_name": Advantage(load=template_name, config=TemplateOptions, min_group_size=2)}
