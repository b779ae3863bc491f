"""The policy as an episode sees it: tokens in, tokens out, within the limits of the run file."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_core.types import Prompt, Request

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Rollout, Sampling

Ask = Callable[[Request], Awaitable["Rollout"]]


class LimitReached(Exception):
    """The episode has no turn or no token left. Uncaught it ends the episode: what there is is its rollout, as truncated."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use."""

    turns: int  # samples
    tokens: int  # of the whole sequence, prompt included
    episode_seconds: float
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled to go on from ``before``."""

    number: int  # from 1
    before: list[int]  # the tokens that it was given
    token_ids: list[int]  # what it sampled
    log_probs: Tensor  # [n] float32, of the sampled tokens
    policy_versions: Tensor  # [n] int32
    finish_reason: str  # "stop" (end token or stop string), "length", "abort"
    text: str  # decoded for reading, special tokens kept except the end of sequence; never encoded again
    extras: dict[str, Tensor] = field(default_factory=dict)  # [n], as of ``Rollout.extras``


class Policy:
    """Samples for one episode.

    Args:
        request: the episode's own: its prompt, how to sample, its seed.
        limits: what the episode may use.
        ask: has one request sampled.
        tokenizer: decodes what was sampled.
    """

    def __init__(self, request: Request, limits: Limits, ask: Ask, tokenizer: Any) -> None:
        self.request, self.limits, self.tokenizer = request, limits, tokenizer
        self.turns: list[Turn] = []  # that came back
        self.asked = 0
        self._ask = ask

    @property
    def turns_left(self) -> int:
        """Times that it may still be asked."""
        return self.limits.turns - self.asked

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Turn:
        """Have the policy go on from ``token_ids``.

        Each turn has a seed of its own, of the step, the group, the place in it and the turn's number, so
        that the same episode gives the same tokens whatever runs beside it.

        Args:
            token_ids: the sequence so far, the prompt's tokens first.
            max_tokens: at most that many; default and upper bound: `rollout.max_response_tokens`.
            stop: strings that end the turn and stay in it; default: `rollout.stop`.
            stop_token_ids: default: `rollout.stop_token_ids`.

        Raises:
            LimitReached: the episode has no turn or no token left; nothing was sampled.
            ValueError: ``max_tokens`` is under 1.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        room = self.limits.tokens - len(token_ids)
        if self.turns_left < 1 or room < 1:
            what = "turn" if self.turns_left < 1 else "token"
            raise LimitReached(f"no {what} is left after {self.asked} turns and {len(token_ids)} tokens")
        self.asked += 1
        request = self._request(self.asked, list(token_ids), room, max_tokens, stop, stop_token_ids)
        turn = self._turn(self.asked, request.prompt.token_ids, await self._ask(request))
        self.turns.append(turn)
        return turn

    def close(self) -> None:
        """The episode is over: whatever still runs of it samples nothing more."""
        self._ask = _refuse

    def _request(
        self,
        number: int,
        before: list[int],
        room: int,
        max_tokens: int | None,
        stop: Sequence[str] | None,
        stop_token_ids: Sequence[int] | None,
    ) -> Request:
        own, sampling = self.request, self.request.sampling
        if isinstance(stop, str):
            raise TypeError(f"stop must be a list of strings, got the text {stop!r}: write [{stop!r}]")
        changed: Sampling = dataclasses.replace(
            sampling,
            max_response_tokens=min(
                room, sampling.max_response_tokens, room if max_tokens is None else max_tokens
            ),
            stop=sampling.stop if stop is None else tuple(stop),
            stop_token_ids=sampling.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids),
            seed=None if sampling.seed is None else turn_seed(sampling.seed, number),
        )
        prompt = Prompt(own.prompt.id, before, "")
        return Request(f"{own.id}:{number}", prompt, changed, own.group_id, own.index)

    def _turn(self, number: int, before: list[int], rollout: Rollout) -> Turn:
        start = len(before)
        tokens: list[int] = rollout.token_ids[start:].tolist()
        end = self.tokenizer.eos_token_id
        shown = tokens[:-1] if tokens[-1:] == [end] else tokens
        return Turn(
            number,
            before,
            tokens,
            rollout.rollout_log_probs[start:].clone(),
            rollout.policy_versions[start:].clone(),
            rollout.finish_reason,
            self.tokenizer.decode(shown, skip_special_tokens=False),
            {name: tensor[start:].clone() for name, tensor in rollout.extras.items()},
        )


async def _refuse(request: Request) -> Rollout:
    raise RuntimeError(f"The episode is over; nothing is sampled for '{request.id}'.")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn of an episode (63 bits); the first turn has the episode's own, as without an environment."""
    if turn == 1:
        return seed
    text = f"{seed}:{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
