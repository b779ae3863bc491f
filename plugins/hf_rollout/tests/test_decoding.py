"""Sampling a batch from real models: log-probs, ends, and that rows do not feel each other."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from engine_core.types import Sampling
from engine_plugin_hf_rollout import decoding
from engine_plugin_hf_rollout.decoding import Decoding

EOS = 1


@pytest.fixture
def run(decode):
    """``run(model, requests)`` without gradient; 64 positions unless told otherwise."""

    def sampled(model, requests, ends=(EOS,), max_positions=64):
        with torch.no_grad():
            decoding = Decoding(model, requests, frozenset(ends), decode, max_positions)
            decoding.advance(model)
            return decoding.results()

    return sampled


@pytest.fixture
def forwards(monkeypatch):
    """``forwards(model)``: a list that grows by [rows, tokens] of every forward pass from now on."""

    def watch(model):
        seen = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(list(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return seen

    return watch


# -- log-probs ----------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.2, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8, "top_k": 20},
        {"temperature": 0.0, "top_p": 0.5},
    ],
)
def test_log_probs_are_those_of_a_float64_forward(
    run, make_model, make_requests, ragged, slow_log_probs, family, sampling
):
    model = make_model(family)
    requests = make_requests(ragged, **sampling)
    results = run(model, requests)
    assert sum(len(result.tokens) for result in results) > 60
    for request, result in zip(requests, results, strict=True):
        asked = request.sampling
        if asked.temperature == 0:  # greedy: those of temperature 1, nothing cut
            asked = Sampling()
        log_probs, mass = slow_log_probs(model, request.prompt.token_ids, result.tokens, asked)
        assert result.log_probs == pytest.approx(log_probs, abs=1e-5)
        assert result.log_mass == pytest.approx(mass, abs=1e-5)


def test_samplings_differ_within_a_batch(run, make_model, make_requests, ragged, slow_log_probs):
    model = make_model()
    cuts = [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.4}]
    requests = [make_requests([ids], **cuts[i % 4])[0] for i, ids in enumerate(ragged)]
    for request, result in zip(requests, run(model, requests), strict=True):
        log_probs, _ = slow_log_probs(model, request.prompt.token_ids, result.tokens, request.sampling)
        assert result.log_probs == pytest.approx(log_probs, abs=1e-5)


def test_first_tokens_come_as_often_as_softmax_says(run, make_model, make_requests):
    model, prompt, count = make_model(), [5, 90, 17], 6000
    results = run(model, make_requests([prompt] * count, max_response_tokens=1, temperature=1.5))
    found = torch.tensor([result.tokens[0] for result in results]).bincount(minlength=260) / count
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 1.5, -1)
    deviation = (expected * (1 - expected) / count).sqrt()
    likely = expected * count > 20
    assert likely.sum() > 10
    assert bool(((found - expected).abs() < 4 * deviation)[likely].all())
    assert found[~likely].sum().item() == pytest.approx(expected[~likely].sum().item(), abs=0.03)


# -- rows on their own --------------------------------------------------------


def test_a_support_is_told_where_something_was_cut(run, make_model, make_requests, ragged, monkeypatch):
    """Not where all tokens could come, though the request asks for it."""
    model, looked = make_model("qwen3"), []
    whole = decoding.support
    monkeypatch.setattr(decoding, "support", lambda *given: looked.append(1) or whole(*given))
    assert all(found.support is None for found in run(model, make_requests(ragged, max_support=8)))
    assert not looked
    assert all(
        found.support is not None for found in run(model, make_requests(ragged, max_support=8, top_k=3))
    )
    assert looked


def tokens_of(results):
    return [result.tokens for result in results]


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_a_request_gives_the_same_tokens_alone(run, make_model, make_requests, ragged, sampling):
    model, requests = make_model(), make_requests(ragged, **sampling)
    together = tokens_of(run(model, requests))
    assert together == [tokens_of(run(model, [request]))[0] for request in requests]
    assert together[::-1] == tokens_of(run(model, requests[::-1]))


def test_other_seeds_give_other_tokens(run, make_model, make_requests):
    first, second, third = make_requests([[5, 6]] * 3)
    third = replace(third, sampling=first.sampling)
    results = tokens_of(run(make_model(), [first, second, third]))
    assert results[0] == results[2] != results[1]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_greedy_is_what_transformers_generate_gives(run, make_model, make_requests, ragged, family):
    model = make_model(family)
    reference = make_model(family, attention="eager")
    for ids, result in zip(ragged, run(model, make_requests(ragged, temperature=0.0)), strict=True):
        generated = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
        )
        assert result.tokens == generated[0, len(ids) :].tolist()


def test_rows_that_finish_early_do_not_change_the_others(
    run, forwards, make_model, make_requests, ragged, monkeypatch
):
    model = make_model()
    requests = make_requests(ragged)
    requests = [
        replace(r, sampling=replace(r.sampling, max_response_tokens=2 + 3 * (i % 4)))
        for i, r in enumerate(requests)
    ]
    found = {}
    for threshold in (0.0, 0.75, 1.1):  # never, as it is, at every end
        monkeypatch.setattr(decoding, "COMPACT_BELOW", threshold)
        seen = forwards(model)
        found[threshold] = tokens_of(run(model, requests, ends=[]))
        rows = [shape[0] for shape in seen[1:]]
        assert rows == sorted(rows, reverse=True)
        assert (rows[-1] < 9) == (threshold > 0)
    assert found[0.0] == found[0.75] == found[1.1]
    assert [len(tokens) for tokens in found[0.0]] == [2, 5, 8, 11, 2, 5, 8, 11, 2]


def test_requests_with_one_prompt_read_it_once(run, forwards, make_model, make_requests):
    model = make_model()
    requests = make_requests([[5, 6, 7]] * 3 + [[8]] + [[5, 6, 7]])
    separate = [run(model, [request])[0] for request in requests]
    seen = forwards(model)
    together = run(model, requests)
    assert seen[0] == [2, 3]
    assert seen[1] == [5, 1]
    assert tokens_of(together) == tokens_of(separate)
    for a, b in zip(together, separate, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def test_the_model_is_not_changed(run, make_model, make_requests, ragged):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    run(model, make_requests(ragged))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# -- ends ---------------------------------------------------------------------


@pytest.fixture
def say(run, speaker, tokenizer, make_requests):
    """``say("abcdef", stop=("d",))``: what is said after the first token, and why it ended."""

    def said(text, **sampling):
        prompt = tokenizer.encode(text, add_special_tokens=False)[:1]
        asked = {"temperature": 0.0, "max_response_tokens": 50} | sampling
        result = run(speaker(text), make_requests([prompt], **asked))[0]
        return tokenizer.decode(result.tokens), result.finish_reason

    return said


def test_an_end_token_ends_and_stays(say):
    assert say("Helo!") == ("elo!<eos>", "stop")


def test_no_room_ends_with_length(say):
    assert say("Helo!", max_response_tokens=3) == ("elo", "length")


def test_an_end_token_in_the_last_place_is_a_stop(say):
    assert say("Helo!", max_response_tokens=5) == ("elo!<eos>", "stop")


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        ("Helo wrd", ("o",), "elo"),
        ("Helo wrd", ("lo w",), "elo w"),  # spans four tokens
        ("Helo wrd", ("zz", "wr"), "elo wr"),
        ("1ab2", ("b",), "ab"),  # within a token
        ("1ab2", ("1a",), None),  # its beginning is the prompt's
        ("Hé!o", ("é",), "é"),  # two tokens, one character
        ("Hé!o", ("é!",), "é!"),
        ("H\N{PARTY POPPER}!o", ("\N{PARTY POPPER}",), "\N{PARTY POPPER}"),  # four tokens
        ("Helo wrd", ("He",), None),
        ("Helo wrd", ("<eos>",), "elo wrd<eos>"),
    ],
)
def test_a_stop_string_ends_and_stays(say, text, stop, said):
    expected = (text[1:] + "<eos>") if said is None else said
    assert say(text, stop=stop) == (expected, "stop")


def test_a_long_response_stops_at_a_stop_string_far_behind_its_beginning(
    run, make_model, make_requests, decode
):
    model = make_model()
    whole = run(model, make_requests([[9, 9]], max_response_tokens=40), ends=[])[0].tokens
    text = decode([whole])[0]
    stop = next(
        text[i : i + 3]
        for i in range(20, 40)
        if "\ufffd" not in text[i : i + 3] and text.find(text[i : i + 3]) == i
    )
    result = run(model, make_requests([[9, 9]], max_response_tokens=40, stop=(stop,)), ends=[])[0]
    shortest = next(n for n in range(41) if stop in decode([whole[:n]])[0])
    assert result.tokens == whole[:shortest]
    assert result.finish_reason == "stop"


def test_stop_strings_are_those_of_each_request(run, speaker, tokenizer, make_requests):
    prompt = tokenizer.encode("H")
    stops = [("l",), (), ("o", "e")]
    requests = [make_requests([prompt], temperature=0.0, stop=stop)[0] for stop in stops]
    results = run(speaker("Helo!"), requests)
    assert [tokenizer.decode(result.tokens) for result in results] == ["el", "elo!<eos>", "e"]


def test_stop_tokens_are_those_of_each_request(run, speaker, tokenizer, make_requests):
    letter_l, letter_o = (tokenizer.encode(letter)[0] for letter in "lo")
    stops = [(letter_o,), (), (letter_o, letter_l)]
    requests = [
        make_requests([tokenizer.encode("H")], temperature=0.0, stop_token_ids=stop)[0] for stop in stops
    ]
    results = run(speaker("Helo!"), requests)
    assert [tokenizer.decode(result.tokens) for result in results] == ["elo", "elo!<eos>", "el"]
    assert [result.finish_reason for result in results] == ["stop"] * 3


def test_prompt_and_response_fit_into_the_models_positions(run, make_model, make_requests):
    requests = make_requests([[5] * 12, [5] * 15, [5]], max_response_tokens=40)
    results = run(make_model(), requests, ends=[], max_positions=16)
    assert [len(result.tokens) for result in results] == [4, 1, 15]
    assert {result.finish_reason for result in results} == {"length"}


def test_a_forward_that_names_the_cache_alone_is_given_it(run, make_model, make_requests):
    model = make_model()

    class Plain(PreTrainedModel):
        def __init__(self):
            super().__init__(model.config)
            self.inner = model

        def forward(
            self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None
        ):
            lengths.append(input_ids.shape[1])
            return self.inner(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)

    lengths = []
    requests = make_requests([[5], [5, 6, 7]], max_response_tokens=6)
    plain, whole = run(Plain(), requests), run(model, requests)
    assert [each.tokens for each in plain] == [each.tokens for each in whole]
    assert lengths == [3, 1, 1, 1, 1, 1]
