"""Synthetic work: batches and requests of exact lengths, the same in every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.types import Batch, Prompt, Request, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

LOWEST = 3  # tokens below are likely to be special ones


def train_batch(lengths: Sequence[int], prompt: int, vocabulary: int, seed: int) -> Batch:
    """Make a batch of random tokens, with equal loss weights on those after the first ``prompt`` of each sequence.

    Args:
        lengths: [B] tokens of each sequence.
        prompt: tokens of each sequence without loss.
        vocabulary: tokens are below it.
        seed: the seed of the random tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(list(lengths))
    ids = torch.randint(min(LOWEST, vocabulary - 1), vocabulary, (int(counts.sum()),), generator=generator)
    batch = Batch(ids, counts)
    position = torch.arange(len(ids)) - batch.offsets[:-1][batch.sequence_index]
    mask = position >= prompt
    share = mask.float() / mask.sum()
    return batch.with_columns(
        tokens={"loss_mask": mask, "weights": share, "token_share": share},
        sequences={"group_ids": torch.arange(len(counts))},
    )


def requests(
    prompts: int, group: int, prompt_tokens: int, response_tokens: int, vocabulary: int, seed: int
) -> list[Request]:
    """Make requests of random prompts; a random model hardly ever ends early, so that responses have full length."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(prompts):
        ids = torch.randint(min(LOWEST, vocabulary - 1), vocabulary, (prompt_tokens,), generator=generator)
        prompt = Prompt(f"bench:{number}", ids.tolist(), "")
        for index in range(group):
            sampling = Sampling(
                max_response_tokens=response_tokens, seed=seed * 1_000_003 + number * group + index
            )
            made.append(Request(f"{number}:{index}", prompt, sampling, number, index))
    return made
