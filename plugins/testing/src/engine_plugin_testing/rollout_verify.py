"""A check of any rollout against its request and the float64 reference of the weights of each of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.types import SUPPORT, TENSORS
from engine_plugin_testing.contracts import close
from engine_plugin_testing.reference import EOS, logits_of
from engine_plugin_testing.rollout_bench import RolloutBench, plain_text, response
from engine_plugin_testing.rollout_cuts import Cut, cuts
from engine_plugin_testing.rollout_partial import check_extras

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engine_core.types import Request, Rollout, Sampling

MASS = "support_log_mass"


class Verifier:
    """A checker of rollouts that keeps what was drawn, for a test of independence.

    Args:
        bench: of the engine.
        positions: most tokens of a sequence.
        modules: references by the policy version of their weights; more may be added later.
    """

    def __init__(self, bench: RolloutBench, positions: int, modules: Mapping[int, nn.Module]) -> None:
        self.bench, self.positions, self.modules = bench, positions, modules
        #: of each response, log-probs [N, V] of the distributions and tokens [N]
        self.drawn: list[tuple[Tensor, Tensor]] = []

    def check(self, request: Request, rollout: Rollout, versions: Sequence[int], may_stop: bool) -> None:
        """Assert that a rollout answers its request and that the reference explains every token.

        Args:
            request: what was asked.
            rollout: the answer.
            versions: rising versions that were current while it was sampled.
            may_stop: whether it may have been stopped before its end.
        """
        self._check_columns(request, rollout, versions)
        found, expected = (rollout.response_length, rollout.finish_reason), self._end(request, rollout)
        assert found == expected, f"it has length and finish reason {found}; expected {expected}"
        assert may_stop or rollout.finish_reason != "abort", "it was stopped, which nothing asked for"
        text = plain_text(self.bench, response(rollout))
        assert rollout.text in (text, ""), f"its text is {rollout.text!r}; expected {text!r}"
        self._check_tokens(rollout, len((request.begun or request.unsampled()).token_ids), request.sampling)

    def _check_columns(self, request: Request, rollout: Rollout, versions: Sequence[int]) -> None:
        """Compare the columns with the prompt, or with the tokens that were sampled before, and look at the versions."""
        found = (rollout.prompt, rollout.group_id, rollout.index)
        asked = (request.prompt, request.group_id, request.index)
        assert found == asked, f"its prompt, group and index are {found}; asked were {asked}"
        before, size = request.begun or request.unsampled(), len(rollout.token_ids)
        start = len(before.token_ids)
        for name, kind in TENSORS.items():
            column = getattr(rollout, name)
            shape = (str(column.dtype), len(column))
            assert shape == (f"torch.{kind}", size), f"{name} is {shape}; expected {kind} of {size}"
            assert torch.equal(column[:start], getattr(before, name)), (
                f"{name} of the first {start} tokens differ"
            )
        check_extras(rollout, before)
        assert bool(rollout.loss_mask[start:].all()), "a sampled token is not in the loss mask"
        new = rollout.policy_versions[start:].tolist()
        rising = sorted(version for version in new if version in versions)
        assert new == rising, f"its versions are {new}, of {list(versions)}"

    def _end(self, request: Request, rollout: Rollout) -> tuple[int, str]:
        """Return the length and the finish reason that the tokens and the options of a response ask for."""
        sampling, tokens = request.sampling, response(rollout)
        begun = request.begun.response_length if request.begun else 0
        most = min(sampling.max_response_tokens, self.positions - rollout.prompt_length)
        for at in range(begun, len(tokens)):
            text = self.bench.tokenizer.decode(tokens[: at + 1]) if sampling.stop else ""
            if tokens[at] in (EOS, *sampling.stop_token_ids) or any(stop in text for stop in sampling.stop):
                return at + 1, "stop"
        return (most, "length") if len(tokens) >= most else (len(tokens), "abort")

    @torch.no_grad()
    def _check_tokens(self, rollout: Rollout, start: int, sampling: Sampling) -> None:
        """Compare each token from ``start`` on, its log-prob, mass and support, with the reference of its version."""
        versions, size = rollout.policy_versions.tolist(), len(rollout.token_ids)
        if start == size:
            return
        logits = {v: logits_of(self.modules[v], rollout.token_ids).double() for v in set(versions[start:])}
        chosen = [self._cut(logits[versions[at]][at - 1], rollout, at, sampling) for at in range(start, size)]
        rows, tokens = torch.stack([cut.log_probs for cut in chosen]), rollout.token_ids[start:]
        expected = rows.gather(1, tokens[:, None]).squeeze(1)
        assert bool(expected.isfinite().all()), f"it has tokens that top-k or top-p cut away: {expected}"
        if sampling.log_probs:
            mass = torch.tensor([cut.log_mass for cut in chosen])
            close(rollout.rollout_log_probs[start:], expected, self.bench.tolerance, "its log-probs")
            close(rollout.extras.get(MASS, torch.cat([torch.zeros(start), mass]))[start:], mass, self.bench.tolerance, MASS)  # fmt: skip
        if sampling.temperature:
            self.drawn.append((rows, tokens))

    def _cut(self, row: Tensor, rollout: Rollout, at: int, sampling: Sampling) -> Cut:
        """Return the correct distribution that is nearest to the log-prob of a token; check its support, and greedy choices.

        Args:
            row: [V] logits of the token's version.
        """
        token, ids = int(rollout.token_ids[at]), rollout.extras.get(SUPPORT)
        support = [] if ids is None else sorted(i for i in ids[at].tolist() if i >= 0)
        gap = float(row.max() - row[token])
        assert sampling.temperature or gap <= self.bench.margin, (
            f"token {at} is {token}, whose logit is {gap:.3g} below the largest, at temperature 0"
        )
        right = [Cut(torch.log_softmax(row / (sampling.temperature or 1.0), -1), 0.0)]
        right = cuts(row, sampling, self.bench.tolerance) if sampling.cuts else right
        most = min(sampling.max_support, len(row) - 1)
        allowed = [sorted(cut.keeps()) if len(cut.keeps()) <= most else [] for cut in right]
        if sampling.log_probs:
            assert support in allowed, f"token {at} has the support {support}; expected {allowed[0]}"
        reported = float(rollout.rollout_log_probs[at]) if sampling.log_probs else 0.0
        apart = [abs(reported - float(cut.log_probs[token])) for cut in right]
        return right[apart.index(min(apart))]
