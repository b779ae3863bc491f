"""The policy's interface for an episode: tokens in, tokens out, within the limits of the run file."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_core.types import Prompt, Request

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Rollout, Sampling

Ask = Callable[[Request], Awaitable["Rollout"]]


class LimitReached(Exception):
    """An error: the episode has no turn or no token left. Uncaught, it ends the episode with a truncated rollout.

    Args:
        message: what is used up.
        rewards: rewards of the truncated episode by name; the others that its environment declares are 0.
    """

    def __init__(self, message: str, rewards: Mapping[str, float | None] | None = None) -> None:
        super().__init__(message)
        self.rewards = rewards or {}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one episode."""

    turns: int  # samples
    tokens: int  # length of the whole sequence, prompt included
    episode_seconds: float
    tool_seconds: float
    tool_characters: int  # of one answer


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: the tokens that the policy sampled after ``before``."""

    number: int  # from 1
    before: list[int]  # the context
    token_ids: list[int]  # the sampled tokens
    log_probs: Tensor  # [n] float32, of the sampled tokens
    policy_versions: Tensor  # [n] int32
    finish_reason: str  # "stop" (end token or stop string), "length", "abort"
    text: str  # decoded for reading, special tokens kept except the end of the turn; never encoded again
    extras: dict[str, Tensor] = field(default_factory=dict)  # [n], as in ``Rollout.extras``
    seconds: float = 0.0  # from the request to the sampler until its answer


class Policy:
    """The policy of one episode.

    Args:
        request: the episode's request: its prompt, sampling parameters and seed.
        limits: the episode's limits.
        ask: sends a request to the sampler and awaits its rollout.
        tokenizer: decodes sampled tokens.
    """

    def __init__(self, request: Request, limits: Limits, ask: Ask, tokenizer: Any) -> None:
        self.request, self.limits, self.tokenizer = request, limits, tokenizer
        self.turns: MutableSequence[Turn] = []  # sampled so far
        self.asked = 0
        self._ask = ask
        self._sampled_for = 0.0  # seconds
        self._waiting, self._since = 0, 0.0  # turns that are being sampled, and since when

    @property
    def turns_left(self) -> int:
        """Number of turns that may still be sampled."""
        return self.limits.turns - self.asked

    @property
    def sampling_seconds(self) -> float:
        """The time in which at least one turn was being sampled, or waited for the sampler."""
        return self._sampled_for + (time.perf_counter() - self._since if self._waiting else 0.0)

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> Turn:
        """Sample a turn that continues ``token_ids``.

        Each turn has a separate seed, derived from the step, the group, the index in the group and the turn's number.
        So an episode gives the same tokens independent of other episodes.

        Args:
            token_ids: the sequence so far, beginning with the prompt's tokens.
            max_tokens: maximum length of the turn; default and upper bound: `rollout.max_response_tokens`.
            stop: strings that end the turn and are kept in it; default: `rollout.stop`.
            stop_token_ids: tokens that end the turn; default: `rollout.stop_token_ids`.
            options: other sampling options, for turns that are not learned.

        Raises:
            LimitReached: the episode has no turn or no token left; nothing was sampled.
            TypeError: ``stop`` is a text, not a list.
            ValueError: ``max_tokens`` is less than 1.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        room = self.limits.tokens - len(token_ids)
        if self.turns_left < 1 or room < 1:
            what = "turn" if self.turns_left < 1 else "token"
            raise LimitReached(f"no {what} is left after {self.asked} turns and {len(token_ids)} tokens")
        self.asked += 1
        request = self._request(self.asked, list(token_ids), room, max_tokens, stop, stop_token_ids)
        if options:
            request.sampling = dataclasses.replace(request.sampling, **options)
        number, begun = self.asked, time.perf_counter()
        self._since = self._since if self._waiting else begun
        self._waiting += 1
        try:
            rollout = await self._ask(request)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._sampled_for += time.perf_counter() - self._since
        turn = self._turn(number, request.prompt.token_ids, rollout, time.perf_counter() - begun)
        self.turns.append(turn)
        return turn

    def close(self) -> None:
        """End the policy: code of the episode that still runs cannot sample any more."""
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

    def _turn(self, number: int, before: list[int], rollout: Rollout, seconds: float) -> Turn:
        start = len(before)
        tokens: list[int] = rollout.token_ids[start:].tolist()
        return Turn(
            number,
            before,
            tokens,
            rollout.rollout_log_probs[start:].clone(),
            rollout.policy_versions[start:].clone(),
            rollout.finish_reason,
            self._text(tokens),
            {name: tensor[start:].clone() for name, tensor in rollout.extras.items()},
            seconds,
        )

    def _text(self, token_ids: list[int]) -> str:
        """Return the text of a turn without the token that ends it: a special token or one of `rollout.stop_token_ids`."""
        decode, last = self.tokenizer.decode, token_ids[-1:]
        special = decode(last, skip_special_tokens=True) != decode(last, skip_special_tokens=False)
        ended = special or any(token in self.request.sampling.stop_token_ids for token in last)
        return str(decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=False))


async def _refuse(request: Request) -> Rollout:
    raise RuntimeError(f"The episode is over; nothing is sampled for '{request.id}'.")


def turn_seed(seed: int, turn: int) -> int:
    """Return the 63-bit seed of a turn; the first turn has the episode's seed, as without an environment."""
    if turn == 1:
        return seed
    text = f"{seed}:{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
