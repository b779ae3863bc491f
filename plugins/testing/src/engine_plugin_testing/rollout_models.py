"""Contracts on other models and sizes: an untied model with biases, long sequences, many requests, later tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_core.types import Prompt, Request, Sampling
from engine_plugin_testing.contracts import close, contract
from engine_plugin_testing.reference import EOS, VOCABULARY
from engine_plugin_testing.rollout_bench import RolloutBench, plain_text, response
from engine_plugin_testing.rollout_cuts import CUTTING
from engine_plugin_testing.rollout_draws import check_draws, chosen, rows_of_response

if TYPE_CHECKING:
    from torch import nn

    from engine_core.contracts.engines import RolloutEngine

LENGTHS = (
    1,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    63,
    64,
    65,
    79,
    96,
    110,
)  # of prompts: at borders of blocks and chunks
LONG = 80  # tokens of the longest responses


def _check_model(bench: RolloutBench, engine: RolloutEngine, module: nn.Module, what: str) -> None:
    """Assert that greedy tokens, and log-probs of sampled ones, are those of ``module``."""
    for request, rollout in _sampled(engine, bench.requests(temperature=0.0)):
        expected = bench.greedy(module, request.prompt.token_ids, request.sampling.max_response_tokens)
        found = response(rollout)[: len(expected)]
        assert found == expected, f"{what}: '{request.prompt.text}' gives {found}; expected {expected}."
    for request, rollout in _sampled(engine, bench.requests(temperature=1.0)):
        close(
            rollout.rollout_log_probs[rollout.prompt_length :],
            chosen(rows_of_response(module, rollout), rollout),
            bench.tolerance,
            f"rollout_log_probs of '{request.id}' of {what}",
        )


def _sampled(engine: RolloutEngine, requests: Sequence[Request]) -> Any:
    return zip(requests, engine.generate(requests), strict=True)


@contract(
    catches=(
        "dropout while sampling",
        "norm weights and biases left out of an update",
        "a head tied by force",
    )
)
def a_model_with_biases_and_dropout_is_sampled_right(bench: RolloutBench) -> None:
    """A model of another family, with biases and dropout, also gives the tokens and log-probs of the reference.

    The model is untied, and its norm weights are not 1. The contract holds also after an update of all weights.
    """
    first, other = bench.second_model(), bench.second_model(seed=1)
    engine = bench.engine(first)
    _check_model(bench, engine, bench.reference(first), "the second model")
    engine.update_weights(bench.stream(other), 1)
    _check_model(bench, engine, bench.reference(other), "the second model after an update")


def _many(count: int = 150) -> list[Request]:
    """Return requests of mixed sizes: prompts of 1 to 110 tokens, some with a common beginning; a few long responses."""
    draws = random.Random(3)
    common = [draws.randrange(2, VOCABULARY) for _ in range(max(LENGTHS))]
    made = []
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        ids = [draws.randrange(2, VOCABULARY) for _ in range(length)]
        if i % 2:
            ids = [*common[: length - 1 - i % 3], *ids][:length]  # differ in the last tokens alone
        most = LONG if i % 30 < 2 else 12 if length == max(LENGTHS) else 1 + i % 7
        sampling = Sampling(temperature=(1.0, 0.7, 1.4)[i % 3], max_response_tokens=most, seed=i)
        made.append(Request(f"{i}", Prompt(f"train:{i}", ids, f"prompt {i}"), sampling, group_id=i))
    return made


@contract(
    catches=(
        "attention to the last tokens only",
        "requests beyond a hundred lost",
        "a cached prefix of another prompt",
        "a cache that loses its contents when it grows",
        "log-probs of late tokens shifted by one",
    )
)
def many_requests_of_all_sizes_are_sampled_right(bench: RolloutBench) -> None:
    """150 requests of all sizes come back in order, with the log-probs of the reference.

    Prompts have 1 to 110 tokens and responses up to 80. Each text is right, and tokens are drawn from the
    distributions of the reference.
    """
    requests = _many()
    rollouts = bench.engine().generate(requests)
    assert len(rollouts) == len(requests), f"{len(rollouts)} rollouts for {len(requests)} requests."
    for request, rollout in zip(requests, rollouts, strict=True):
        tokens, most = response(rollout), request.sampling.max_response_tokens
        assert rollout.request_id == request.id, f"'{request.id}' was answered by '{rollout.request_id}'."
        assert rollout.token_ids[: rollout.prompt_length].tolist() == request.prompt.token_ids, (
            "Another prompt."
        )
        found = (rollout.finish_reason, len(tokens))
        right = ("stop", len(tokens)) if EOS in tokens else ("length", most)
        assert found == right, f"'{request.id}' ended with {tokens[-1:]} and {found}; expected {right}."
        expected = plain_text(bench, tokens)
        assert rollout.text in (expected, ""), f"text is {rollout.text!r}; expected {expected!r}."
    longest = max(rollout.response_length for rollout in rollouts)
    assert longest >= 60, f"The longest response has {longest} tokens; this contract needs 60."
    check_draws(bench.reference(), requests, rollouts, bench.tolerance, "of 150 requests")


@contract(
    catches=(
        "one random number for all tokens of a response",
        "later tokens drawn from the middle",
        "the tail never drawn at later tokens",
        "one random number for two requests",
        "another temperature at later tokens",
        "top-p and top-k at first tokens only",
        "the random numbers of a response repeated",
        "random numbers of seed plus position",
        "the random numbers of the request sixteen before",
    )
)
def later_tokens_follow_their_distributions(bench: RolloutBench) -> None:
    """Each later token of a response is drawn from its own distribution, independently of other draws.

    The distribution is that given the tokens before it, at the temperature and after the cuts. It depends on no other
    token of the response, and on no token of another request. 80 responses of a group are sampled with seeds and
    without.
    """
    engine, module = bench.engine(), bench.reference()
    for sampling in bench.supported({"temperature": 0.7, "seed": None}, {"temperature": 1.5}, CUTTING[-1]):
        requests = bench.requests(("The answer",), group=80, max_response_tokens=8, **sampling)
        rollouts = engine.generate(requests)
        check_draws(module, requests, rollouts, bench.tolerance, f"with {sampling}")
