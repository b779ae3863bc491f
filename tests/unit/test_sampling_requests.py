"""Every refusal of a request, by its words."""

import dataclasses

import pytest
import torch

from engine_core.errors import DataError
from engine_core.sampling import check_request
from engine_core.types import Prompt, Request, Sampling


def check(request, taken=(), **limits):
    check_request(request, taken, vocabulary=260, max_positions=64, **limits)


@pytest.fixture
def make_requests():
    """``make_requests([[5, 6], [7]], temperature=0.7)``: one request a prompt."""

    def make(prompts, **sampling):
        return [
            Request(
                f"r{i}", Prompt(f"train:{i}", ids, ""), Sampling(**{"max_response_tokens": 12} | sampling)
            )
            for i, ids in enumerate(prompts)
        ]

    return make


def test_a_good_request_passes(make_requests):
    check(
        make_requests([[0, 259] + [5] * 61], temperature=0.0, top_k=3, top_p=0.1, stop=("x",))[0], {"other"}
    )


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (
            [],
            r"Request 'r0' \(prompt 'train:0'\) has no tokens\. An empty prompt cannot be continued; give it a start token\.",
        ),
        ([5, 260], r"Request 'r0' .* has token 260, and the model knows 0 to 259\. Check the tokenizer\."),
        ([5, -1], r"Request 'r0' .* has token -1, and the model knows 0 to 259\."),
        (
            [5] * 64,
            r"Request 'r0' .* has 64 tokens, and the model holds 64 with the response\. Lower data\.max_prompt_tokens\.",
        ),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(make_requests, ids, words):
    with pytest.raises(DataError, match=words):
        check(make_requests([ids])[0])


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": -0.1}, r"temperature -0\.1; expected at least 0"),
        ({"temperature": float("nan")}, "temperature nan; expected a finite number"),
        ({"temperature": float("inf")}, "temperature inf; expected a finite number"),
        ({"top_p": 0.0}, r"top_p 0\.0; expected a number above 0"),
        ({"top_p": 1.5}, r"top_p 1\.5; expected at most 1"),
        ({"top_k": -1}, "top_k -1; expected at least 0"),
        ({"max_response_tokens": 0}, "max_response_tokens 0; expected a number above 0"),
        ({"stop": ("x", "")}, r"stop \('x', ''\); expected at least 1 characters"),
    ],
)
def test_a_sampling_that_makes_no_sense_is_refused(make_requests, sampling, words):
    with pytest.raises(ValueError, match=rf"Request 'r0' \(prompt 'train:0'\) has {words}"):
        check(make_requests([[5]], **sampling)[0])


def test_an_id_that_waits_already_is_refused(make_requests):
    with pytest.raises(
        ValueError, match=r"Request 'r0' .* is queued already\. Requests must have distinct ids\."
    ):
        check(make_requests([[5]])[0], {"r0"})


def begun(request, tokens):
    """What there is of its response."""
    return dataclasses.replace(
        request.unsampled(), token_ids=torch.tensor(request.prompt.token_ids + tokens), finish_reason="abort"
    )


def test_a_response_that_is_over_or_anothers_is_not_gone_on_with(make_requests):
    one, other = make_requests([[5], [6]])
    check(dataclasses.replace(one, begun=begun(one, [7] * 11)))
    for response, words in [
        (begun(one, [7] * 12), "has 12 tokens, and 12 at most are asked for: nothing is left to sample"),
        (begun(other, [7]), "has another prompt"),
    ]:
        with pytest.raises(ValueError, match=f"continues a response that {words}"):
            check(dataclasses.replace(one, begun=response))


def test_a_sampler_with_limits_of_its_own_says_so(make_requests):
    hot = make_requests([[5]], temperature=2.5)[0]
    check(hot)
    with pytest.raises(ValueError, match=r"temperature 2\.5; the sampler takes 2 at most"):
        check(hot, hottest=2.0)
    with pytest.raises(
        DataError, match=r"has 64 tokens, and the server holds 64 with the response\. Shorten it\."
    ):
        check(make_requests([[5] * 64])[0], holder="the server", instead="Shorten it.")
