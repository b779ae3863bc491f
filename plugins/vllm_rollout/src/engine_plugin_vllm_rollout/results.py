"""Conversion of vLLM's outputs to rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine_core.errors import TrainingFailed
from engine_core.sampling import begun_ids, logits_not_finite
from engine_core.types import SUPPORT, TENSORS, Request, Rollout, padded_support
from engine_plugin_vllm_rollout.log_mass import log_mass

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput

Decode = Callable[[list[int]], str]
LOG_MASS = "support_log_mass"  # extra of rollouts
REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass
class Running:
    """A request in vLLM."""

    request: Request
    internal_id: str  # vLLM's own
    versions: list[tuple[int, int]] = field(default_factory=list)
    # ^ (first token, policy version) wherever it changed while the response was sampled


def rollout_of(
    running: Running,
    output: CompletionOutput | None,
    version: int,
    decode: Decode,
    likeliest: Sequence[float] | None = None,
) -> Rollout:
    """One finished request.

    Args:
        running: what was asked.
        output: of vLLM; None where nothing was sampled yet.
        version: policy version of what was sampled since the last entry of ``running.versions``.
        decode: token ids to text, special tokens included.
        likeliest: log-prob of the likeliest token before top-p and top-k cut, at each position; None: not noted.

    Raises:
        TrainingFailed: a log-prob is not a number.
    """
    request = running.request
    prompt = request.prompt.token_ids + begun_ids(request)  # all that vLLM was given
    tokens = list(output.token_ids) if output else []
    flat: FlatLogprobs | None = output.logprobs if output else None  # type: ignore[assignment]
    count = len(prompt) + len(tokens)
    log_probs, mask = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
    if request.sampling.log_probs:
        log_probs[len(prompt) :] = _sampled_log_probs(flat, len(tokens), request.id, version)
    mask[len(prompt) :] = True
    extras = {}
    if likeliest is not None:
        by_token = (
            [
                flat.logprobs[start:end]
                for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
            ]
            if flat
            else []
        )
        extras[LOG_MASS] = torch.tensor([0.0] * len(prompt) + log_mass(likeliest, by_token))
    if request.sampling.log_probs and request.sampling.max_support and request.sampling.cuts:
        extras[SUPPORT] = _support(flat, len(prompt), request.sampling.max_support)
    made = Rollout(
        request_id=request.id,
        prompt=request.prompt,
        token_ids=torch.from_numpy(np.array(prompt + tokens, dtype=np.int64)),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        policy_versions=_policy_versions(len(prompt), count, [*running.versions, (len(tokens), version)]),
        finish_reason=_reason(output),
        group_id=request.group_id,
        index=request.index,
        extras=extras,
    )
    if request.begun is not None:
        _join(made, request.begun)
        if request.sampling.stop:
            end_at_border(made, len(request.begun.token_ids), request.sampling.stop, decode)
    return made


def _sampled_log_probs(flat: FlatLogprobs | None, count: int, id: str, version: int) -> Tensor:
    """[count] float32: of the sampled tokens, which vLLM tells first at each position.

    By way of numpy, which reads a list of numbers many times as fast as torch does: a step's hundreds of thousands of
    tokens are read while the GPU waits.

    Raises:
        TrainingFailed: one is not a number.
    """
    log_probs = np.array(flat.logprobs, dtype=np.float32) if flat else np.empty(0, dtype=np.float32)
    if flat and len(log_probs) != count:  # those of other tokens lie between
        log_probs = log_probs[np.array(flat.start_indices, dtype=np.int64)]
    if len(log_probs) != count:
        raise RuntimeError(f"vLLM gave request '{id}' {len(log_probs)} log-probs for {count} tokens.")
    if not np.isfinite(log_probs).all():
        raise logits_not_finite(id, version)
    return torch.from_numpy(log_probs)


def _join(rollout: Rollout, begun: Rollout) -> None:
    """Put what was sampled before in its place, which vLLM knows as part of the prompt."""
    count = len(begun.token_ids)
    for name in ("loss_mask", "rollout_log_probs", "policy_versions"):
        getattr(rollout, name)[:count] = getattr(begun, name)
    if LOG_MASS in rollout.extras:
        rollout.extras[LOG_MASS][:count] = begun.extras.get(LOG_MASS, torch.zeros(count))
    if SUPPORT in rollout.extras:
        new, old = rollout.extras[SUPPORT], begun.extras.get(SUPPORT)
        old = torch.empty(count, 0, dtype=torch.int32) if old is None else old
        width = max(new.shape[1], old.shape[1])
        rollout.extras[SUPPORT] = torch.cat([padded_support(old, width), padded_support(new[count:], width)])


def end_at_border(rollout: Rollout, begun: int, stop: Sequence[str], decode: Decode) -> None:
    """End a response at a stop string that lies on the border between what was sampled before and what was sampled now.

    vLLM looks for stop strings in what it sampled itself. What came behind one is dropped.

    Args:
        rollout: changed in place.
        begun: tokens of the sequence that were there before.
        stop: strings that end a response; the match stays in it.
        decode: token ids to text, special tokens included.
    """
    longest = max(map(len, stop), default=0)
    start = max(rollout.prompt_length, begun - 4 * (longest + 2))  # characters of up to 4 tokens each
    end = min(len(rollout.token_ids), begun + 4 * (longest + 2))
    for last in range(begun + 1, end + 1):
        text = decode(rollout.token_ids[start:last].tolist())
        if any(text.find(each) >= 0 for each in stop):
            for name in TENSORS:
                setattr(rollout, name, getattr(rollout, name)[:last])
            rollout.extras = {name: column[:last] for name, column in rollout.extras.items()}
            rollout.finish_reason = "stop"
            return


def _reason(output: CompletionOutput | None) -> str:
    found = output.finish_reason if output else "abort"
    if found not in REASONS:
        raise TrainingFailed(
            f"vLLM ended a response for the reason '{found}'; expected stop, length or abort."
        )
    return REASONS[found]


def _policy_versions(prompt: int, count: int, ends: Sequence[tuple[int, int]]) -> Tensor:
    """[count] int32, 0 at the prompt. ``ends``: (tokens sampled until then, version) in order."""
    versions = torch.zeros(count, dtype=torch.int32)
    start = prompt
    for end, version in ends:
        at = prompt + end
        versions[start:at] = version
        start = at
    return versions


def _support(flat: FlatLogprobs | None, prompt: int, most: int) -> Tensor:
    """Return [T_i, K] int32: the tokens with a log-prob above -inf, if they are at most ``most``; else -1.

    vLLM lists the sampled token first and then the likeliest ones, which may include the sampled one again. One more
    than ``most`` was requested, so that a larger support is recognized.
    """
    rows: list[list[int]] = [[] for _ in range(prompt)]
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True) if flat else ():
        kept = {
            token
            for token, log_prob in zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True)  # type: ignore[union-attr]
            if log_prob > -math.inf
        }
        rows.append(sorted(kept) if len(kept) <= most else [])
    width = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32).reshape(
        len(rows), width
    )
