"""Contracts of text: tokens that are not characters, and the ends that stop strings and stop tokens make.

A byte-level tokenizer is made for the second model, in which the tokens of one of its greedy responses are pieces of a known
text: several characters, a part of one, a space before a full stop. The expected text is put together from the pieces.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from engine_core.types import Prompt, Request, Sampling
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.reference import EOS, LETTERS, LIVELIER, PAD, VOCABULARY, logits_of
from engine_plugin_testing.rollout_bench import RolloutBench, response

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

    from engine_core.types import Rollout

PIECES = (b" ", b"\xc3", b"\xa9", b" .", b"abc", b" de!")  # together " \u00e9 .abc de!"
ELSEWHERE = [
    letter.encode() for letter in LETTERS if letter not in " abcde"
]  # the pieces of all other tokens
CYCLE = (50, 10, 20, 30, 40)  # a prompt, and the tokens that follow it in a circle
SMILEY = (b"\xf0", b"\x9f", b"\x98", b"\x80")  # their pieces: one character of four tokens
STARTS = 300  # prompts that are tried for a response of different tokens


@dataclass(frozen=True)
class Story:
    """A prompt whose greedy response is, token by token, ``PIECES``."""

    prompt: list[int]
    tokens: list[int]
    pieces: dict[int, bytes]  # of every token

    def text(self, tokens: Sequence[int]) -> str:
        """Put the pieces of tokens together; a part of a character that is left alone becomes U+FFFD."""
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


@torch.no_grad()
def _different(bench: RolloutBench, module: nn.Module, prompt: list[int]) -> list[int]:
    """Return the greedy response up to its end, a token for the second time, or two tokens within ``bench.margin``."""
    found: list[int] = []
    while len(found) < len(PIECES):
        best = logits_of(module, torch.tensor(prompt + found))[-1].topk(2)
        token = int(best.indices[0])
        if float(best.values[0] - best.values[1]) < bench.margin or token in (*found, *prompt, EOS, PAD):
            break
        found.append(token)
    return found


def _starts() -> Iterator[list[int]]:
    draws = random.Random(1)
    for _ in range(STARTS):
        yield [draws.randrange(2, VOCABULARY) for _ in range(2)]


def _story(bench: RolloutBench, module: nn.Module) -> Story:
    for prompt in _starts():
        tokens = _different(bench, module, prompt)
        if len(tokens) == len(PIECES):
            break
    else:
        raise AssertionError(
            f"The model repeats itself: none of {STARTS} greedy responses begins with {len(PIECES)} different tokens. "
            f"{LIVELIER}"
        )
    others = [token for token in range(2, VOCABULARY) if token not in tokens]
    pieces = dict(zip(tokens + others, [*PIECES, *ELSEWHERE], strict=True))
    return Story(prompt, tokens, {PAD: b"", EOS: b"", **pieces})


def _tokenizer(story: Story, special: Sequence[int] = ()) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a story; the tokens ``special``, whose pieces are ASCII, are special ones."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS}
    words |= {"".join(map(_byte, piece)): token for token, piece in story.pieces.items() if piece}
    made = Tokenizer(models.WordLevel(vocab=words, unk_token="?"))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=[story.text([token]) for token in special],
        clean_up_tokenization_spaces=False,
    )


def _byte(value: int) -> str:
    """Return the character that stands for a byte in byte-level tokenizers: itself if it is visible."""
    if 33 <= value <= 126 or (161 <= value <= 255 and value != 173):
        return chr(value)
    return chr((256 if value < 33 else 162) + value)


def _told(bench: RolloutBench) -> tuple[str, Story, nn.Module]:
    """Return the folder of the second model, its story and its reference; the bench has its tokenizer from now on."""
    path = bench.second_model()
    module = bench.reference(path)
    story = _story(bench, module)
    bench.tokenizer = _tokenizer(story)
    return path, story, module


def _check(story: Story, rollout: Rollout, expected: Sequence[int], reason: str, what: str) -> None:
    tokens = response(rollout)
    text = story.text(expected)
    assert tokens == list(expected), f"{what}: the response is {story.text(tokens)!r}; expected {text!r}."
    assert rollout.finish_reason == reason, (
        f"{what}: finish_reason is '{rollout.finish_reason}'; expected '{reason}'."
    )
    assert rollout.text in (text, ""), f"{what}: text is {rollout.text!r}; expected {text!r}."


@contract(
    options=("stop",),
    catches=(
        "only the last two characters of a stop string compared",
        "only the first of several stop strings",
        "stop strings found in the prompt",
        "stop tokens ignored where stop strings are given",
        "a stop in the last place reported as length",
        "text without its first space",
        "text cleaned up",
        "tokens decoded one by one",
        "as many tokens decoded as the longest stop string has characters",
        "two tokens decoded for each character of the longest stop string",
    ),
)
def stop_strings_cross_the_borders_of_tokens(bench: RolloutBench) -> None:
    """A stop string ends a response even if it spans several tokens or ends within one.

    Tokens have several characters or a part of one, in one batch and in a batch for each string, and text is exact. A response ends with the token
    that completes the first stop string or is a stop token, also as the last token allowed. A stop string in the
    prompt ends nothing. A stop string may have 17 characters of up to four tokens each.
    """
    _check_long(bench)
    path, story, _ = _told(bench)
    tokens, prompt = story.tokens, story.text(story.prompt)
    other = next(token for token in range(2, VOCABULARY) if token not in tokens)
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (6, "length", {}),
        (3, "length", {"max_response_tokens": 3}),
        (6, "stop", {"stop": ("bc de",)}),
        (5, "stop", {"stop": ("\u00e9 .a",)}),
        (3, "stop", {"stop": ("\u00e9",)}),
        (5, "stop", {"stop": (" \u00e9 .abc",)}),
        (5, "stop", {"stop": ("never", "e!", ".ab")}),
        (6, "length", {"stop": (prompt, f"{prompt} ", "xbc", "?e")}),
        (4, "stop", {"stop": ("bc",), "stop_token_ids": (tokens[3],)}),
        (5, "stop", {"stop": (".a",), "stop_token_ids": (tokens[5],)}),
        (5, "stop", {"stop": ("c",), "max_response_tokens": 5}),
        (5, "stop", {"stop_token_ids": (other, tokens[4]), "max_response_tokens": 5}),
    ]
    cases = [case for case in cases if bench.supported(case[2])]
    requests = []
    for number, (_, _, changes) in enumerate(cases):
        sampling = Sampling(**{"temperature": 0.0, "max_response_tokens": len(tokens), **changes})
        requests.append(
            Request(f"{number}", Prompt(f"train:{number}", list(story.prompt), prompt), sampling, number)
        )
    engine = bench.engine(path)
    together, alone = engine.generate(requests), [engine.generate([request])[0] for request in requests]
    for where, rollouts in (("with others", together), ("alone", alone)):
        for (count, reason, changes), rollout in zip(cases, rollouts, strict=True):
            _check(story, rollout, tokens[:count], reason, f"{changes or 'nothing asked'} {where}")


def _check_long(bench: RolloutBench) -> None:
    """Assert that stop strings end responses whose characters have four tokens each."""
    if (path := _cycle(bench)) is None:
        return
    others = [token for token in range(2, VOCABULARY) if token not in CYCLE]
    pieces = dict(zip([*CYCLE, *others], [b"c", *SMILEY, *ELSEWHERE, b" "], strict=True))
    story = Story([CYCLE[0]], 20 * list(CYCLE[1:]), {PAD: b"", EOS: b"", **pieces})
    bench.tokenizer = _tokenizer(story)
    requests, counts = [], (1, 2, 5, 17)
    for count in counts:
        stop = (count * b"".join(SMILEY).decode(), "never")
        sampling = Sampling(temperature=0.0, max_response_tokens=len(story.tokens), stop=stop)
        requests.append(Request(f"{count}", Prompt("train:0", story.prompt, "c"), sampling, count))
    for count, rollout in zip(counts, bench.engine(path).generate(requests), strict=True):
        expected = story.tokens[: count * len(SMILEY)]
        _check(story, rollout, expected, "stop", f"a stop string of {count} characters of four tokens")


def _cycle(bench: RolloutBench) -> str | None:
    """Return the folder of the second model, changed so that ``CYCLE[1:]`` follows and repeats; None if its weights have other names."""
    source = Path(bench.second_model())
    folder = source.with_name(f"cycle-{source.name}")
    weights = dict(bench.stream(str(source)))
    if not {"model.embed_tokens.weight", "lm_head.weight"} <= weights.keys():
        return None
    if bench.place.rank == 0 and not folder.exists():
        for name, value in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                value.zero_()  # the last token alone decides
        for token, following in itertools.pairwise([*CYCLE, CYCLE[1]]):
            weights["lm_head.weight"][following] += 100 * weights["model.embed_tokens.weight"][token]
        partial = folder.with_name(f"partial-{folder.name}")
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(weights, partial / "model.safetensors", {"format": "pt"})
        partial.rename(folder)
    bench.barrier()
    return str(folder)


@contract(options=("stop",), catches=("stop strings searched in text without special tokens",))
def a_stop_string_may_be_a_special_token(bench: RolloutBench) -> None:
    """A stop string that is, begins with or ends with a special token ends a response. The text has no special tokens."""
    path, story, _ = _told(bench)
    tokens, place = story.tokens, PIECES.index(b"abc")
    bench.tokenizer = _tokenizer(story, special=[tokens[place]])
    cases = [(5, ("abc",)), (5, (" .ab",)), (6, ("bc de",)), (6, ("never",))]
    requests = [
        Request(
            f"{number}",
            Prompt(f"train:{number}", list(story.prompt), story.text(story.prompt)),
            Sampling(temperature=0.0, max_response_tokens=len(tokens), stop=stop),
            number,
        )
        for number, (_, stop) in enumerate(cases)
    ]
    for (count, stop), rollout in zip(cases, bench.engine(path).generate(requests), strict=True):
        found, expected = response(rollout), tokens[:count]
        assert found == expected, (
            f"stop={stop}, 'abc' is special: the response is {found}, expected {expected}."
        )
        plain = story.text(tokens[:place] + tokens[place + 1 : count])
        assert rollout.text in (plain, ""), f"stop={stop}: text is {rollout.text!r}; expected {plain!r}."


@contract(
    catches=(
        "an end token in the last place reported as length",
        "no end of sequence where stop strings are given",
    )
)
def an_end_token_may_be_the_last_one_allowed(bench: RolloutBench) -> None:
    """If the end token is the last token allowed, the finish reason is ``stop``, not ``length``.

    300 short responses are sampled, some with stop strings or stop tokens too. Their text is exact.
    """
    path, story, module = _told(bench)
    with torch.no_grad():
        starts = list(itertools.islice(_starts(), 150))
        likely = [float(logits_of(module, torch.tensor(ids))[-1].softmax(-1)[EOS]) for ids in starts]
    prompt = Prompt("train:0", starts[likely.index(max(likely))], "any")
    further = bench.supported({}, {"stop": ("never",)}, {"stop_token_ids": (story.tokens[0],)})
    engine, last = bench.engine(path), 0
    for first in range(0, 1200, 300):
        requests = []
        for seed in range(first, first + 300):
            changes = {"max_response_tokens": 1 + seed // len(further) % 3, **further[seed % len(further)]}
            requests.append(Request(f"{seed}", prompt, Sampling(seed=seed, **changes), 0, seed))
        for request, rollout in zip(requests, engine.generate(requests), strict=True):
            tokens, sampling = response(rollout), request.sampling
            ends = [at for at, token in enumerate(tokens) if token in (EOS, *sampling.stop_token_ids)]
            count = ends[0] + 1 if ends else sampling.max_response_tokens
            last += bool(ends) and tokens[-1] == EOS and count == sampling.max_response_tokens
            what = f"{tokens} of {sampling}"
            assert len(tokens) == count, f"{what}: {len(tokens)} tokens; expected {count}."
            if "\ufffd" not in story.text(tokens):
                _check(story, rollout, tokens, "stop" if ends else "length", what)
        if last:
            break
    assert last, f"None of 1200 responses ended with its last token allowed. {LIVELIER}"
