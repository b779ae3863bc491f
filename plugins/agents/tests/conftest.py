"""Environments in one-file plugins, a sampler that follows a script, and a real tokenizer."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine_core.config.models import DataConfig, EnvironmentConfig
from engine_core.contracts.engines import RolloutEngine
from engine_core.local.runtime import LocalGroup
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_agents.runner import EnvironmentRunner

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and three special ones."""
    words = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def templated():
    """templated(template): the tokenizer with a chat template, of which CHATML stands for ChatML."""
    return lambda template: make_tokenizer(template and template.replace("CHATML", CHATML))


class Scripted(RolloutEngine):
    """Says what ``script(request)`` says, or letters drawn from the request's seed and tokens.

    Args:
        tokenizer: encodes what the script says.
        script: text and finish reason for a request.
        order: seed of the order in which requests finish.
        per_step: how many finish in one step; 0: all.
    """

    def __init__(self, tokenizer, script=None, order=0, per_step=0):
        super().__init__(None, None, None)
        self.tokenizer, self.script, self.per_step = tokenizer, script or self.letters, per_step
        self.random = random.Random(order)
        self.queue: list[Request] = []
        self.asked: list[Request] = []
        self.aborted: list[str] = []
        self.most = 0  # queued at once

    def letters(self, request):
        drawn = random.Random(f"{request.sampling.seed}:{request.prompt.token_ids}")
        count = drawn.randint(1, request.sampling.max_response_tokens)
        return "".join(drawn.choice("abcdefgh") for _ in range(count)), "stop"

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def add(self, requests):
        self.queue += requests
        self.asked += requests
        self.most = max(self.most, len(self.queue))

    @property
    def num_unfinished(self):
        return len(self.queue)

    def step(self):
        self.random.shuffle(self.queue)
        count = self.per_step or len(self.queue)
        taken, self.queue = self.queue[:count], self.queue[count:]
        return [self.answer(request) for request in taken]

    def answer(self, request):
        text, reason = self.script(request)
        before = request.prompt.token_ids
        said = self.encode(text)
        said = said[: request.sampling.max_response_tokens]
        drawn = random.Random(f"{request.sampling.seed}:{before}")
        log_probs = [0.0] * len(before) + [-drawn.random() for _ in said]
        count = len(before) + len(said)
        return Rollout(
            request.id,
            request.prompt,
            torch.tensor(before + said),
            torch.arange(count) >= len(before),
            torch.tensor(log_probs),
            torch.full((count,), self.version, dtype=torch.int32),
            reason,
            request.group_id,
            request.index,
        )

    def abort(self, ids):
        self.aborted += ids
        self.queue = [request for request in self.queue if request.id not in ids]
        return []

    def update_weights(self, stream, version):
        return ""


@pytest.fixture
def scripted(tokenizer):
    """scripted(script, order=0, per_step=0): a sampler."""
    return lambda *arguments, **named: Scripted(tokenizer, *arguments, **named)


@pytest.fixture
def requests(tokenizer) -> Callable[..., list[Request]]:
    """requests(4, group_size=2): ``Q0``, ``Q1``, ... with the columns ``number`` and ``answer``."""

    def make(count, group_size=2, **sampling):
        sampling = {"max_response_tokens": 16} | sampling
        made = []
        for i in range(count):
            group, index = divmod(i, group_size)
            ids = tokenizer(f"Q{group}", add_special_tokens=False)["input_ids"]
            prompt = Prompt(f"train:{group}", ids, f"Q{group}", {"number": group, "answer": str(group)})
            made.append(
                Request(f"1:{group}:{index}", prompt, Sampling(seed=1000 + i, **sampling), group, index)
            )
        return made

    return make


HEAD = """
import asyncio, threading, time
from engine_core import hookimpl
from engine_plugin_agents import find_tag
from engine_core.specs import Environment, Options
"""
TAIL = """
@hookimpl
def engine_environments():
    return {"mine": Environment(load=mine, **globals().get("SPEC", {}))}
"""


@pytest.fixture
def environment(tmp_path, tokenizer):
    """environment(source, **settings): the runner of a plugin whose source defines ``mine`` (and ``SPEC``).

    ``own`` is a tokenizer in place of the fixture's; ``data`` are further keys of ``[data]``.
    """
    made = []

    def make(
        source,
        options=None,
        max_tokens=200,
        columns=("number", "answer"),
        rewards=(),
        control_tokens="text",
        own=None,
        data=None,
        **settings,
    ):
        file = tmp_path / f"environment_{len(made)}.py"
        file.write_text(HEAD + textwrap.dedent(source) + TAIL)
        plugins = PluginSet.load({"environments": {"mine"}}, [file.name], tmp_path)
        config = EnvironmentConfig(name="mine", **settings)
        config.options = plugins.spec("environments", "mine").config.model_validate(options or {})
        runner = EnvironmentRunner(
            config,
            plugins,
            own or tokenizer,
            max_tokens,
            columns,
            rewards,
            DataConfig(control_tokens=control_tokens, **(data or {})),
        )
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()


@pytest.fixture
def play():
    """play(runner, engine, requests): the rollouts."""

    def run(runner, engine, requests):
        parts = runner.stream(LocalGroup(engine), requests)
        found = {rollout.request_id: rollout for part in parts for rollout in part}
        rollouts = [found[request.id] for request in requests]
        runner.check_failures(rollouts)
        return rollouts

    return run


ENDPOINT = """
import httpx
from openai import OpenAI, AsyncOpenAI
from engine_plugin_agents import endpoint

SPEC = {"rewards": frozenset({"good"})}

"""


@pytest.fixture
def harness(environment):
    """harness(source, **settings): the runner of an environment whose source defines the harness ``solve``."""

    def make(source, max_tokens=4000, **settings):
        return environment(f"{ENDPOINT}{source}\nmine = endpoint(solve)\n", max_tokens=max_tokens, **settings)

    return make
