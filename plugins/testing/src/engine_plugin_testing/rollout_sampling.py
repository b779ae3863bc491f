"""Contracts of sampling: the distribution, its log-probs, ends and seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from engine_core import tables
from engine_core.types import Sampling
from engine_plugin_testing.contracts import close, contract, refused
from engine_plugin_testing.reference import EOS, LETTERS, LIVELIER, VOCABULARY, logits_of
from engine_plugin_testing.rollout_bench import RolloutBench, expected_log_probs, plain_text, response
from engine_plugin_testing.rollout_cuts import CUTTING, GREEDY, ONE, SHARP, cuts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from engine_core.contracts.engines import RolloutEngine
    from engine_core.types import Request, Rollout
    from engine_plugin_testing.rollout_cuts import Cut

SIGMAS = 5.0  # chance of a false alarm below one in a million


def _compared(bench: RolloutBench, **sampling: Any) -> Tensor:
    """Compare log-probs with the reference; return those of all N sampled tokens, [N]."""
    requests, module = bench.requests(group=2, **sampling), bench.reference()
    values = []
    for request, rollout in zip(requests, bench.engine().generate(requests), strict=True):
        expected, mass = expected_log_probs(module, rollout, request.sampling, bench.tolerance)
        found = rollout.rollout_log_probs[rollout.prompt_length :]
        values.append(found)
        close(found, expected, bench.tolerance, f"rollout_log_probs of '{request.id}' with {sampling}")
        if "support_log_mass" in rollout.extras:
            kept = rollout.extras["support_log_mass"][rollout.prompt_length :]
            close(kept, mass, bench.tolerance, f"support_log_mass of '{request.id}' with {sampling}")
    return torch.cat(values)


@contract(catches=("rollout log-probs shifted by one token", "rollout log-probs rounded to 16 bits"))
def log_probs_equal_the_reference(bench: RolloutBench) -> None:
    """At temperature 1, ``rollout_log_probs`` equal those of an independent float64 forward pass.

    They have the digits of float32, also those of a model that computes in 16 bits.
    """
    values = _compared(bench)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.equal(values.to(dtype).float(), values)
        assert not rounded, f"rollout_log_probs have the digits of {dtype}: {values[:5].tolist()}."


@contract(catches=("log-probs reported at temperature 1",))
def log_probs_are_at_the_temperature(bench: RolloutBench) -> None:
    """Log-probs are those of the distribution that tokens are drawn from, ``softmax(logits / temperature)``."""
    _compared(bench, temperature=0.6)
    _compared(bench, temperature=1.6)


@contract(
    options=tables.CUTTING, catches=("log-probs before top-p and top-k", "a token too many left by top-p")
)
def log_probs_are_of_what_top_p_and_top_k_left(bench: RolloutBench) -> None:
    """With top-p and top-k, log-probs are those of the truncated distribution.

    ``support_log_mass``, if given, is the mass that was kept.
    """
    for sampling in bench.supported(*CUTTING):
        _compared(bench, **sampling)


@contract(options=tables.CUTTING, catches=("the mass of what top-p and top-k left not returned",))
def log_probs_with_the_mass_kept_are_over_the_vocabulary(bench: RolloutBench) -> None:
    """With top-p and top-k, ``rollout_log_probs + support_log_mass`` are the log-probs over the whole vocabulary.

    The trainer needs the extra ``support_log_mass`` wherever it does not compute over ``support_ids``.
    """
    module = bench.reference()
    for sampling in bench.supported(*CUTTING):
        for request, rollout in _pairs(bench.engine(), bench.requests(group=2, **sampling)):
            mass = rollout.extras.get("support_log_mass")
            assert mass is not None, f"'{request.id}' with {sampling} lacks the extra support_log_mass [T]."
            whole = Sampling(temperature=request.sampling.temperature)
            expected, _ = expected_log_probs(module, rollout, whole, bench.tolerance)
            found = (rollout.rollout_log_probs + mass)[rollout.prompt_length :]
            what = f"rollout_log_probs + support_log_mass of '{request.id}' with {sampling}"
            close(found, expected, bench.tolerance, what)


@contract(capability="support", options=tables.CUTTING, catches=("the support of another token",))
def the_support_is_what_top_p_and_top_k_left(bench: RolloutBench) -> None:
    """With ``Sampling.max_support``, ``support_ids`` has the tokens from which each token was drawn.

    If more tokens remain, the row has none.
    """
    width, module = 8, bench.reference()
    for sampling in bench.supported(*CUTTING):
        requests = bench.requests(group=2, max_support=width, **sampling)
        for request, rollout in zip(requests, bench.engine().generate(requests), strict=True):
            ids = rollout.extras["support_ids"]
            assert ids.dtype == torch.int32, f"support_ids are {ids.dtype}, expected int32."
            assert bool((ids[: rollout.prompt_length] == -1).all()), (
                "support_ids at prompt tokens are not -1."
            )
            with torch.no_grad():
                logits = logits_of(module, rollout.token_ids)
            for at in range(rollout.prompt_length, len(rollout.token_ids)):
                right = [cut.keeps() for cut in cuts(logits[at - 1], request.sampling, bench.tolerance)]
                expected = [sorted(kept) if len(kept) <= width else [] for kept in right]
                support = sorted(token for token in ids[at].tolist() if token >= 0)
                assert support in expected, (
                    f"support_ids of token {at} of '{request.id}' with {sampling} are {support}; expected {expected[0]}."
                )
    plain = bench.engine().generate(bench.requests(**CUTTING[0]))
    assert all("support_ids" not in rollout.extras for rollout in plain), "support_ids came unasked."


@contract(catches=("temperature ignored in sampling", "top-k ignored in sampling"))
def samples_follow_the_distribution(bench: RolloutBench) -> None:
    """First tokens are drawn as often as temperature, top-k and top-p say.

    The frequencies are those of 400 requests. A token that was cut is never sampled.
    """
    engine, module = bench.engine(), bench.reference()
    for sampling in bench.supported({"temperature": 0.5}, {"temperature": 2.0}, *SHARP):
        requests = bench.requests(("The answer",), group=400, max_response_tokens=1, **sampling)
        tokens = torch.tensor([response(r)[0] for r in engine.generate(requests)])
        with torch.no_grad():
            logits = logits_of(module, torch.tensor(requests[0].prompt.token_ids))[-1]
        wrong = [_unlike(cut, tokens) for cut in cuts(logits, requests[0].sampling, bench.tolerance)]
        assert "" in wrong, f"{sampling}: {wrong[0]}"


def _unlike(cut: Cut, tokens: Tensor) -> str:
    """Return why samples are not of this distribution; empty if they may be.

    Args:
        tokens: [N] sampled token ids.
    """
    values = cut.log_probs[tokens]
    if not bool(values.isfinite().all()):
        return "tokens were sampled that it cuts away."
    kept = cut.log_probs[cut.log_probs.isfinite()]
    mean = float((kept.exp() * kept).sum())
    spread = SIGMAS * math.sqrt(float((kept.exp() * (kept - mean) ** 2).sum()) / len(tokens))
    found = float(values.mean())
    if abs(found - mean) <= spread + 1e-6:
        return ""
    return f"the mean log-prob of {len(tokens)} samples is {found:.3f}; expected {mean:.3f} within {spread:.3f}. Is it applied?"


@contract(
    catches=("temperature 0 sampled at 1", "greedy log-probs of what top-p left", "greedy log-probs of 0")
)
def temperature_0_is_greedy(bench: RolloutBench) -> None:
    """With temperature 0 or top-k 1, the most likely token is taken for any seed.

    At temperature 0, log-probs are those of the whole distribution at temperature 1, also with top-p and top-k.
    """
    engine, module = bench.engine(), bench.reference()
    for sampling in bench.supported(*GREEDY, ONE):
        for request, rollout in _pairs(engine, bench.requests(**sampling)):
            expected = bench.greedy(module, rollout.prompt.token_ids, 12)
            found = response(rollout)[: len(expected)]
            assert found == expected, (
                f"{sampling}: '{rollout.prompt.text}' gives {found}, expected {expected}."
            )
            if not request.sampling.temperature:
                _check_uncut(bench, module, rollout, sampling)


def _pairs(engine: RolloutEngine, requests: list[Request]) -> Iterator[tuple[Request, Rollout]]:
    return zip(requests, engine.generate(requests), strict=True)


def _check_uncut(bench: RolloutBench, module: nn.Module, rollout: Rollout, sampling: dict[str, Any]) -> None:
    """Assert that log-probs are those at temperature 1 without top-p and top-k, and that no mass was cut."""
    expected, _ = expected_log_probs(module, rollout, Sampling(temperature=1.0))
    found, what = (
        rollout.rollout_log_probs[rollout.prompt_length :],
        f"of '{rollout.request_id}' with {sampling}",
    )
    close(found, expected, bench.tolerance, f"rollout_log_probs {what}")
    if (mass := rollout.extras.get("support_log_mass")) is not None:
        close(mass, torch.zeros(len(mass)), bench.tolerance, f"support_log_mass {what}")


def _greedy_story(bench: RolloutBench) -> tuple[str, list[int]]:
    """Return a prompt and its greedy response with many different tokens, so that there is a token to stop at."""
    module = bench.reference()
    best: tuple[str, list[int]] = ("", [])
    firsts = ("The answer", "x", "2+2=", "ab", "Once", "Hm", "(q", "Zz9")
    for text in (*firsts, *(f"{letter}!" for letter in LETTERS[1:])):
        if text not in firsts and len(set(best[1])) >= 5:
            break
        ids = bench.tokenizer.encode(text, add_special_tokens=False)
        best = max(best, (text, bench.greedy(module, ids, 24)), key=lambda pair: len(set(pair[1])))
    assert len(set(best[1])) >= 5, (
        f"The model repeats itself: its liveliest greedy response has {len(set(best[1]))} different tokens, and "
        f"this contract needs 5. {LIVELIER}"
    )
    return best


def _first_times(tokens: list[int]) -> list[int]:
    """Return the positions at which a token occurs for the first time."""
    return [at for at, token in enumerate(tokens) if token not in tokens[:at]]


@contract(options=("stop",), catches=("stop strings ignored",))
def a_stop_string_ends_a_response(bench: RolloutBench) -> None:
    """The token that completes a stop string ends the response, with the finish reason ``stop``.

    The string stays in the response.
    """
    engine = bench.engine()
    text, story = _greedy_story(bench)
    for end in [at for at in _first_times(story) if at >= 2 and min(story[at - 1 : at + 1]) > EOS][:3]:
        for width in (1, 2):  # of one token, and of two
            stop = plain_text(bench, story[end + 1 - width : end + 1])
            assert len(stop) == width, (
                f"Tokens {story[end + 1 - width : end + 1]} of the model's greedy response are not all in the kit's "
                f"vocabulary of {VOCABULARY}: write the model with the `vocab_size` that write_model is given."
            )
            requests = bench.requests(
                (text,), temperature=0.0, max_response_tokens=24, stop=("no such text", stop)
            )
            (rollout,) = engine.generate(requests)
            assert response(rollout) == story[: end + 1], (
                f"Stop string {stop!r}: the response is {plain_text(bench, response(rollout))!r}, expected "
                f"{plain_text(bench, story[: end + 1])!r}."
            )
            assert rollout.finish_reason == "stop", (
                f"finish_reason is '{rollout.finish_reason}'; expected 'stop'."
            )
            assert stop in (rollout.text or stop), (
                f"The text {rollout.text!r} lacks the stop string {stop!r}."
            )


@contract(options=("stop_token_ids",), catches=("stop token ids ignored",))
def a_stop_token_ends_a_response(bench: RolloutBench) -> None:
    """A token of ``stop_token_ids`` ends the response, with the finish reason ``stop``.

    The token stays in the response.
    """
    engine = bench.engine()
    text, story = _greedy_story(bench)
    for end in [at for at in _first_times(story) if at >= 1][:3]:
        ids = (96, story[end]) if 96 not in story else (story[end],)
        requests = bench.requests((text,), temperature=0.0, max_response_tokens=24, stop_token_ids=ids)
        (rollout,) = engine.generate(requests)
        assert response(rollout) == story[: end + 1], (
            f"Stop token {story[end]}: the response is {response(rollout)}, expected {story[: end + 1]}."
        )
        assert rollout.finish_reason == "stop", (
            f"finish_reason is '{rollout.finish_reason}'; expected 'stop'."
        )


def _check_end(rollout: Rollout, most: int) -> None:
    tokens = response(rollout)
    assert 1 <= len(tokens) <= most, f"A response of {len(tokens)} tokens; expected 1 to {most}."
    assert EOS not in tokens[:-1], f"A response continues after its end of sequence: {tokens}."
    expected = "stop" if tokens[-1] == EOS else "length"
    assert rollout.finish_reason == expected, (
        f"A response of {len(tokens)} tokens (at most {most}) that ends with token {tokens[-1]} has the finish reason "
        f"'{rollout.finish_reason}'; expected '{expected}'."
    )
    assert expected == "stop" or len(tokens) == most, (
        f"A response is cut after {len(tokens)} of {most} tokens."
    )


@contract(catches=("wrong finish reason",))
def the_finish_reason_is_true(bench: RolloutBench) -> None:
    """The finish reason is ``stop`` after an end token, and ``length`` after ``max_response_tokens``.

    The end token stays, as the last token of the response.
    """
    engine = bench.engine()
    rollouts = engine.generate(
        bench.requests(("2+2=", "ab"), group=40, temperature=2.0, max_response_tokens=40)
    )
    for rollout in rollouts:
        _check_end(rollout, 40)
    assert any(EOS in response(rollout) for rollout in rollouts), (
        "No response ended: the model hardly ever samples <eos>. Choose another `model` or seed; in a `write_model` "
        "of your own do not make the weights so large that one token has all of the probability."
    )
    (short,) = engine.generate(bench.requests(("ab",), max_response_tokens=1))
    _check_end(short, 1)


@contract(
    catches=(
        "a response cut one token before the last position",
        "a prompt that leaves no position for a response accepted",
    )
)
def a_response_fits_into_the_model(bench: RolloutBench) -> None:
    """Prompt and response together never exceed the model's maximum length.

    A response without an end token has all positions, and its reason is ``length``. Some of 24 responses have none.
    A prompt that leaves one position has a response of one token; one that leaves none is refused.
    """
    prompt, positions = "a" * 40, 48
    engine = bench.engine(bench.model(max_position_embeddings=positions))
    rollouts = engine.generate(bench.requests((prompt,), group=24, max_response_tokens=30, seed=3))
    for rollout in rollouts:
        count, ends = len(rollout.token_ids), EOS in response(rollout)
        assert count <= positions, f"A model of {positions} positions was given {count}."
        found = (rollout.finish_reason, count)
        expected = ("stop", count) if ends else ("length", positions)
        assert found == expected, f"finish_reason and length are {found}; expected {expected}."
    assert any(EOS not in response(rollout) for rollout in rollouts), f"Every response ended. {LIVELIER}"
    (last,) = engine.generate(bench.requests(("a" * (positions - 1),), max_response_tokens=30))
    _check_end(last, 1)
    with refused(f"a prompt of {positions} tokens for a model of {positions} positions"):
        engine.add(bench.requests(("a" * positions,)))


def _responses(rollouts: list[Rollout]) -> list[list[int]]:
    return [response(rollout) for rollout in rollouts]


@contract(catches=("seed ignored", "a seed used for first tokens only"))
def a_seed_gives_the_same_tokens(bench: RolloutBench) -> None:
    """The same seeds give the same tokens again, and in another engine too."""
    engine, requests = bench.engine(), bench.requests(temperature=1.5)
    first, again = _responses(engine.generate(requests)), _responses(engine.generate(requests))
    assert first == again, f"The same seeds gave {first[0]}, then {again[0]}."
    assert _responses(bench.engine().generate(requests)) == first, (
        "Another engine gives other tokens for the same seeds."
    )


@contract(catches=("one seed for all", "only the low bits of a seed used"))
def different_seeds_differ(bench: RolloutBench) -> None:
    """If the requests of a group have different seeds, they do not all get the same response.

    The seeds are near or far apart, or None.
    """
    engine = bench.engine()
    for seed in (0, None):
        found = _responses(engine.generate(bench.requests(("ab",), group=8, temperature=1.5, seed=seed)))
        kinds = len({tuple(tokens) for tokens in found})
        assert kinds >= 6, (
            f"8 requests with {'no seed' if seed is None else 'seeds 0 to 7'} gave {kinds} responses."
        )
    far = [0, *(1 << bits for bits in (5, 6, 7, 8, 10, 16, 24, 31))]
    requests = bench.requests(("ab",), group=len(far), temperature=1.5)
    for seed, request in zip(far, requests, strict=True):
        request.sampling = dataclasses.replace(request.sampling, seed=seed)
    found = _responses(engine.generate(requests))
    same = [seed for seed, tokens in zip(far[1:], found[1:], strict=True) if tokens == found[0]]
    assert len(same) <= 1, f"Seeds {same} give the response of seed 0: {found[0]}."


@contract(catches=("the batch decides what is sampled",))
def a_seed_does_not_depend_on_the_batch(bench: RolloutBench) -> None:
    """A request with a seed gets the same tokens alone and together with other requests.

    The order of the requests does not matter.
    """
    engine, requests = bench.engine(), bench.requests(temperature=1.5)
    whole = _responses(engine.generate(requests))
    turned = _responses(engine.generate(requests[::-1]))[::-1]
    alone = [_responses(engine.generate([request]))[0] for request in requests[:3]]
    for found, expected in itertools.chain(
        zip(turned, whole, strict=True), zip(alone, whole[:3], strict=True)
    ):
        assert found == expected, f"In another batch a request gave {found}, before {expected}."


@contract(catches=("the first request's sampling for all",))
def requests_of_one_batch_keep_their_own_sampling(bench: RolloutBench) -> None:
    """Each request of a batch is sampled with its own temperature, top-k and length."""
    engine, module = bench.engine(), bench.reference()
    requests = bench.requests()
    sharp = bench.supported(*SHARP, {})[0]
    for i, request in enumerate(requests):
        change: dict[str, Any] = {
            "temperature": (0.0, 0.7, 2.0)[i % 3],
            "max_response_tokens": 3 + i,
        } | (sharp if i % 2 else {})
        request.sampling = dataclasses.replace(request.sampling, **change)
    for request, rollout in zip(requests, engine.generate(requests), strict=True):
        if request.sampling.temperature:
            expected, _ = expected_log_probs(module, rollout, request.sampling, bench.tolerance)
            found = rollout.rollout_log_probs[rollout.prompt_length :]
            close(found, expected, bench.tolerance, f"log-probs of {request.sampling}")
        else:
            best = bench.greedy(module, request.prompt.token_ids, request.sampling.max_response_tokens)
            assert response(rollout)[: len(best)] == best, (
                f"{request.sampling} does not give the greedy response."
            )
        _check_end(rollout, request.sampling.max_response_tokens)
