"""The queries of a frozen model in terms that vLLM can answer, and its answers as outputs of the contract.

vLLM does not return logits. For a given sequence it returns the log-prob of each token and of the K likeliest tokens
at its place; for the next token, the log-probs of some tokens; for a sequence classifier, its score. Teachers and
reward models need no more (``TrainEngine.infer``), at temperature 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine_core.errors import ConfigError
from engine_core.types import LOG_OF_NOTHING as NOTHING

if TYPE_CHECKING:
    from engine_core.types import Batch

TABLES = {"teacher": "teacher", "reward_model": "reward.model", "judge": "reward.verdict"}
"""The table of the run file for each role of a frozen model."""

SCORES = frozenset({"scores"})
NEXT = frozenset({"log_probs_at", "log_rest"})
GIVEN = frozenset({"log_probs", "top_ids", "top_log_probs", "top_log_rest"})


@dataclass(frozen=True)
class Given:
    """The log-probs of one sequence of n tokens, at each token but the first."""

    log_probs: Tensor  # [n - 1] of the token that stands there
    top_ids: Tensor  # [n - 1, K] int64, the likeliest first
    top_log_probs: Tensor  # [n - 1, K]


class Model(Protocol):
    """Answers the questions, in this process or behind a server."""

    def scores(self, sequences: Sequence[list[int]]) -> Iterable[float]:
        """Return a one-label classifier's raw score (no sigmoid) at the last token of each sequence."""

    def next_tokens(
        self, prompts: Sequence[list[int]], candidates: Sequence[list[int]]
    ) -> Iterable[list[float]]:
        """The log-probs [K] of each prompt's candidates as its next token."""

    def given(self, sequences: Sequence[list[int]], top_k: int) -> Iterable[Given]:
        """Yield each sequence's log-probs, in order, for two tokens or more; ``top_k`` 0 gives no likeliest tokens."""


def infer(
    model: Model, batch: Batch, outputs: Sequence[str], vocabulary: int, where: str
) -> dict[str, Tensor]:
    """Compute outputs [T] or [T, K] of a frozen model, as ``TrainEngine.infer`` does.

    The rest of a distribution is log(1 - sum p) in float64: below about 1e-7 it is rounding.

    Args:
        model: the model to query.
        batch: sequences at temperature 1.
        outputs: of ``SCORES``, ``NEXT`` or ``GIVEN``, not mixed. Those of ``NEXT`` have values at last tokens only.
        vocabulary: number of tokens of the model.
        where: key of the backend, for messages.

    Raises:
        ConfigError: vLLM cannot return that.
    """
    if batch.temperature != 1.0:
        raise ConfigError(
            f"{where}: vLLM tells log-probs at temperature 1, and {batch.temperature} is asked for. Set it to 1, or use a "
            "train engine such as 'torch'."
        )
    if "support_ids" in batch:
        raise ConfigError(
            f"{where}: vLLM tells log-probs over the whole vocabulary, and those over what top-p and top-k left are asked "
            "for. Set algorithm.correction.support = 'off', or use a train engine such as 'torch'."
        )
    wanted = set(outputs)
    for names, answer in ((SCORES, _scores), (NEXT, _next), (GIVEN, _given)):
        if wanted <= names:
            found = answer(model, batch, vocabulary, where)
            return {name: found[name] for name in outputs}
    raise ConfigError(
        f"{where}: vLLM does not tell {', '.join(sorted(wanted))} in one pass. Use a train engine such as 'torch'."
    )


def _scores(model: Model, batch: Batch, vocabulary: int, where: str) -> dict[str, Tensor]:
    last = _last_tokens(batch, "scores", where)
    scores = torch.zeros(batch.num_tokens)
    scores[last] = torch.tensor(list(model.scores(_sequences(batch))), dtype=torch.float32)
    return {"scores": scores}


def _next(model: Model, batch: Batch, vocabulary: int, where: str) -> dict[str, Tensor]:
    last = _last_tokens(batch, "log-probs of candidates", where)
    candidates = batch["candidate_ids"][last]  # [B, K]
    prompts = [ids[:-1] for ids in _sequences(batch)]
    rows = list(model.next_tokens(prompts, candidates.tolist()))
    values = torch.tensor(rows, dtype=torch.float64).reshape(candidates.shape)
    at = torch.zeros(batch.num_tokens, candidates.shape[1])
    rest = torch.zeros(batch.num_tokens)
    at[last] = values.clamp(min=NOTHING).float()
    rest[last] = log_rest(values, vocabulary)
    return {"log_probs_at": at, "log_rest": rest}


def _given(model: Model, batch: Batch, vocabulary: int, where: str) -> dict[str, Tensor]:
    count, top_k = batch.num_tokens, batch.top_k
    log_probs, rest = torch.zeros(count), torch.zeros(count)
    top_ids = torch.zeros(count, top_k, dtype=torch.int64)
    top_log_probs = torch.zeros(count, top_k)
    mask, starts = batch["loss_mask"], batch.offsets[:-1].tolist()
    asked = [
        (start, ids)
        for start, ids in zip(starts, _sequences(batch), strict=True)
        if len(ids) > 1 and bool(mask[start : start + len(ids)].any())
    ]
    answers = model.given([ids for _, ids in asked], top_k)
    for (start, ids), answer in zip(asked, answers, strict=True):
        place = slice(start + 1, start + len(ids))
        log_probs[place] = answer.log_probs.clamp(min=NOTHING)
        if top_k:
            top_ids[place] = answer.top_ids
            top_log_probs[place] = answer.top_log_probs.clamp(min=NOTHING)
            rest[place] = log_rest(answer.top_log_probs, vocabulary)
    keep = mask.bool()
    found = {"log_probs": log_probs * keep, "top_log_rest": rest * keep}
    return found | {"top_ids": top_ids * keep[:, None], "top_log_probs": top_log_probs * keep[:, None]}


def log_rest(log_probs: Tensor, vocabulary: int) -> Tensor:
    """[n, K] -> [n] float32: log(1 - sum p) of all other tokens together; ``NOTHING`` where there are none."""
    if log_probs.shape[-1] >= vocabulary:
        return torch.full(log_probs.shape[:-1], NOTHING)
    rest = -log_probs.double().exp().sum(-1)
    return torch.log1p(rest.clamp(min=-1.0)).clamp(min=NOTHING).float()


def check_lengths(sequences: Sequence[Sequence[int]], room: int, where: str) -> None:
    """Refuse sequences that vLLM would refuse one by one.

    Args:
        sequences: to be asked about.
        room: tokens that it holds, one of an answer included.
        where: table of its options, for the message.

    Raises:
        ConfigError: one is longer.
    """
    longest = max(map(len, sequences), default=0)
    if longest >= room:
        raise ConfigError(
            f"{where}: a sequence has {longest} tokens, and vLLM holds {room} with one more that it samples. Raise "
            "max_model_len where the model can hold more, or shorten prompts and responses (data.max_prompt_tokens, "
            "rollout.max_response_tokens; of a reward max_tokens)."
        )


def _sequences(batch: Batch) -> list[list[int]]:
    lengths: list[int] = batch.lengths.tolist()
    return [ids.tolist() for ids in batch.token_ids.split(lengths)]


def _last_tokens(batch: Batch, what: str, where: str) -> Tensor:
    """[B] positions of the last tokens, which alone may be asked for."""
    last = batch.offsets[1:] - 1
    others = batch["loss_mask"].bool().clone()
    others[last] = False
    if bool(others.any()):
        raise ConfigError(f"{where}: vLLM tells {what} at the last token of a sequence alone.")
    return last
