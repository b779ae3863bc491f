"""Rollouts of given texts, in a sampler's format, for tests of rewards and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine_core.types import Prompt, Rollout


def rollout_of(text: str, index: int = 0, group: int = 0, prompt: str = "Q", **columns: Any) -> Rollout:
    """Make a rollout of a text: a prompt of two tokens, and a token for each character.

    Args:
        text: the response.
        index: index of the rollout; the id of its prompt is ``train:INDEX``.
        group: id of the rollout's group.
        prompt: text of the prompt.
        columns: columns of the prompt's row.
    """
    token_ids = torch.tensor([7, 8, *range(len(text))])
    return Rollout(
        request_id=f"1:{group}:{index}",
        prompt=Prompt(f"train:{index}", [7, 8], prompt, columns),
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) >= 2,
        rollout_log_probs=torch.zeros(len(token_ids)),
        policy_versions=torch.zeros(len(token_ids), dtype=torch.int32),
        finish_reason="stop",
        group_id=group,
        index=index,
        text=text,
    )


def rollouts_of(*texts: str, **columns: Sequence[Any]) -> list[Rollout]:
    """Make a rollout of each text, in groups of two; a column has a value for each."""
    return [
        rollout_of(text, i, i // 2, **{name: values[i] for name, values in columns.items()})
        for i, text in enumerate(texts)
    ]
