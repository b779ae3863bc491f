"""``[reward.verdict]``: the expected verdict of a language model, from one forward pass.

With the verdicts v of values x(v), and p their probabilities as the first token of the answer::

    reward = sum_v p(v) x(v) / sum_v p(v)

which is the expectation of a sampled verdict, without its noise (https://arxiv.org/abs/2303.16634).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.errors import DataError
from engine_core.rewards.signatures import Outcome
from engine_plugin_rewards.models.classifier import Infer, failure, infer_last
from engine_plugin_rewards.models.questions import AskingReward

if TYPE_CHECKING:
    from engine_plugin_rewards.models.questions import Questions


class VerdictReward(AskingReward):
    """A reward that is the expectation of a language model's verdict.

    Args:
        questions: builds the questions to the model.
        infer: ``infer`` of the model's engine.
        limit: longest question in tokens, including the answer's first token.
        verdicts: texts and their values; each text is a different single token.

    Raises:
        DataError: a verdict is not one token, or two are the same.
    """

    def __init__(self, questions: Questions, infer: Infer, limit: int, verdicts: Mapping[str, float]) -> None:
        super().__init__(questions, limit - 1)
        self.infer = infer
        self.candidates = torch.tensor(one_token_each(questions, list(verdicts)))  # [K]
        self.values = torch.tensor(list(verdicts.values()), dtype=torch.float64)  # [K]

    def answers(self, asked: Sequence[list[int]]) -> list[Outcome]:
        """Return the expected verdict of each question, from one forward pass over all questions."""
        sequences = [[*ids, int(self.candidates[0])] for ids in asked]
        outputs = ("log_probs_at", "log_rest")
        log_probs, rest = infer_last(self.infer, sequences, outputs, candidate_ids=self.candidates)
        self.found = {"other_mass": float(rest.double().exp().mean())}
        expected = log_probs.double().softmax(-1) @ self.values  # [N]
        return [
            Outcome(value) if value == value else failure("the judge gave probabilities that are no numbers")
            for value in expected.tolist()
        ]


def one_token_each(questions: Questions, verdicts: Sequence[str]) -> list[int]:
    """Return the single token of each verdict.

    Raises:
        DataError: a verdict is several tokens, or two are the same token.
    """
    tokens = [questions.tokenizer(text, add_special_tokens=False)["input_ids"] for text in verdicts]
    for text, ids in zip(verdicts, tokens, strict=True):
        if len(ids) != 1:
            raise DataError(
                f"{questions.where}.verdicts: '{text}' is {len(ids)} tokens of the judge, expected one. Choose shorter "
                "words such as Yes and No, A and B, or digits; or let it write: [reward.judge]."
            )
    ids = [int(one[0]) for one in tokens]
    if len(set(ids)) < len(ids):
        raise DataError(f"{questions.where}.verdicts: two of {', '.join(verdicts)} are the same token.")
    return ids
