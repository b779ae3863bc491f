"""Every refusal of a request, by its words."""

import pytest
from engine_plugin_hf_rollout.requests import check_request

from engine_core.errors import DataError


def check(request, taken=()):
    check_request(request, taken, vocabulary=260, max_positions=64)


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
        ({"temperature": -0.1}, r"temperature -0\.1; expected 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature nan; expected 0"),
        ({"temperature": float("inf")}, "temperature inf; expected 0"),
        ({"top_p": 0.0}, r"top_p 0\.0; expected more than 0 and at most 1 \(all tokens\)"),
        ({"top_p": 1.5}, r"top_p 1\.5; expected more than 0"),
        ({"top_k": -1}, r"top_k -1; expected 0 \(all tokens\) or more"),
        ({"max_response_tokens": 0}, "max_response_tokens 0; expected 1 or more"),
        ({"stop": ("x", "")}, "an empty stop string, which every text contains; remove it"),
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
