"""``[reward.judge]``: a language model writes about each response, and the reward is read from its answer.

Votes are sampled with seeds derived from the question itself, so that a sample gets the same votes in any batch, and
again after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine_core.rewards.signatures import Outcome
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_rewards.judging import VerdictReader
from engine_plugin_rewards.models.classifier import failure
from engine_plugin_rewards.models.questions import AskingReward

if TYPE_CHECKING:
    from engine_core.config.rewards import JudgeConfig
    from engine_plugin_rewards.models.questions import Questions

SHOWN = 80  # characters of an answer in a message

Generate = Callable[[Sequence[Request]], Sequence[Rollout]]


class JudgeReward(AskingReward):
    """A reward that reads verdicts from sampled answers of a language model.

    Args:
        questions: builds the questions to the model.
        generate: ``generate`` of the model's engine.
        limit: longest question and answer together, in tokens.
        config: votes, sampling, how a verdict is read.
        seed: the run's seed.
        ends: ids that end an answer, besides the tokenizer's end of sequence.
    """

    def __init__(
        self,
        questions: Questions,
        generate: Generate,
        limit: int,
        config: JudgeConfig,
        seed: int,
        ends: tuple[int, ...] = (),
    ) -> None:
        super().__init__(questions, limit - config.max_response_tokens)
        self.generate, self.config, self.seed, self.ends = generate, config, seed, ends
        self.reader = VerdictReader(config)

    def answers(self, asked: Sequence[list[int]]) -> list[Outcome]:
        """Sample the votes on each question and return the mean of the readable verdicts."""
        votes = self.config.votes
        requests = [
            Request(f"{i}:{vote}", Prompt(str(i), ids, ""), self._sampling(ids, vote), i, vote)
            for i, ids in enumerate(asked)
            for vote in range(votes)
        ]
        written = [self._text(rollout) for rollout in self.generate(requests)]
        read = [self.reader.read(text) for text in written]
        self.found = {"unreadable": sum(value is None for value in read) / len(read)}
        return [
            self._verdict(read[start : start + votes], written[start]) for start in range(0, len(read), votes)
        ]

    def _text(self, rollout: Rollout) -> str:
        """Return the answer's text; some engines return tokens alone."""
        if rollout.text:
            return rollout.text
        written = rollout.token_ids[rollout.prompt_length :].tolist()
        return str(self.questions.tokenizer.decode(written, skip_special_tokens=True))

    def _verdict(self, votes: Sequence[float | None], text: str) -> Outcome:
        known = [vote for vote in votes if vote is not None]
        if known:
            return Outcome(sum(known) / len(known))
        return failure(f"no verdict in the judge's answer: {text[-SHOWN:]!r}")

    def _sampling(self, ids: Sequence[int], vote: int) -> Sampling:
        text = f"{self.seed}:{vote}:{','.join(map(str, ids))}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        config = self.config
        return Sampling(
            config.temperature,
            max_response_tokens=config.max_response_tokens,
            stop_token_ids=self.ends,
            seed=seed,
            log_probs=False,
        )
