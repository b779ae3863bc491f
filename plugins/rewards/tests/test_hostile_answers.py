"""Hostile or accidental responses of a policy: each costs its own sample at most, and its neighbors nothing."""

import json
import math
import os
import re
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.config.rewards import RewardConfig
from engine_core.plugins.plugin_set import PluginSet
from engine_core.rewards import RewardRunner
from engine_core.types import Prompt, Rollout
from engine_plugin_rewards.code_options import CodeOptions
from engine_plugin_rewards.plugin import (
    ExactMatchOptions,
    FormatOptions,
    HTTPOptions,
    LengthOptions,
    MathOptions,
    NumericOptions,
    PythonOptions,
)


def rollout(i, text, answer="2"):
    return Rollout(
        request_id=f"r{i}",
        prompt=Prompt(f"train:{i}", [7, 8], "Q", {"answer": answer}),
        token_ids=torch.tensor([7, 8, 9]),
        loss_mask=torch.tensor([False, False, True]),
        rollout_log_probs=torch.zeros(3),
        policy_versions=torch.zeros(3, dtype=torch.int32),
        finish_reason="stop",
        group_id=i,
        text=text,
    )


def running(mark):
    """Return the processes, other than this one, that inherited a mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture
def runner(fresh_children, monkeypatch):
    """Return ``runner(name, options, ...)``: a runner of one reward; at the end none of its processes is left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ENGINE_TEST_MARK", mark)
    made = []

    def make(name, options, root=Path(), **settings):
        settings = {
            "timeout_seconds": 1.0,
            "max_failure_share": 1.0,
            "workers": 2,
            "on_timeout": "drop",
        } | settings
        config = RewardConfig(name=name, options=options, **settings)
        made.append(RewardRunner([config], PluginSet.load({"rewards": [name]}, [], root)))
        return made[-1]

    yield make
    assert running(mark)
    for one in made:
        one.close()
    assert running(mark) == []


def check(runner, name, hostile, sane, value):
    """Score hostile responses between sane ones.

    Each hostile one must get a finite reward or be a counted failure; the sane ones must get theirs.

    Args:
        runner: of the reward.
        name: of the reward.
        hostile: responses.
        sane: a response, and its answer.
        value: of ``sane``.
    """
    text, answer = sane
    batch = [
        rollout(i, each, answer) for i, each in enumerate([text, *(t for h in hostile for t in (h, text))])
    ]
    metrics = runner.score(batch, 1)
    assert [r.rewards[name] for r in batch[::2]] == [value] * (len(hostile) + 1)
    failed = [r for r in batch if not r.valid and r.rewards[name] is None]
    scored = [r for r in batch if r.valid]
    assert len(failed) + len(scored) == len(batch)
    assert all(math.isfinite(r.rewards[name]) and math.isfinite(r.reward) for r in scored)
    assert len(failed) == metrics["reward/failures"] + metrics["reward/unrewarded"]
    return batch[1::2]


HOSTILE = {
    "a power tower": r"\boxed{9^{9^{9^{9}}}}",
    "a power tower in Python": "9**9**9**9",
    "a factorial of a factorial": r"$((20!)!)!$",
    "a huge exponent": r"\boxed{10^{10^{10}}}",
    "a number with a huge exponent": "1e999999999999",
    "a binomial": r"\boxed{\binom{10^9}{5\cdot10^8}}",
    "a sum": r"\boxed{\sum_{i=1}^{10^{12}} i^i}",
    "an integral": r"\boxed{\int_0^1 x^{x^{x^x}} dx}",
    "a megabyte of digits": "9" * 1_000_000,
    "a megabyte of boxes": r"\boxed{" * 150_000,
    "a megabyte of dollars": "$" * 1_000_000,
    "a nest of parentheses": r"\boxed{" + "(" * 10_000 + "2" + ")" * 10_000 + "}",
    "a nest of fractions": r"\boxed{" + r"\frac{1}{" * 2_000 + "2" + "}" * 2_000 + "}",
    "a nest of roots": r"\boxed{" + r"\sqrt{" * 2_000 + "2" + "}" * 2_000 + "}",
    "a long product": r"\boxed{" + "(x+1)" * 3_000 + "}",
    "a null byte": "\\boxed{2\x00}",
    "right to left": "\\boxed{\u202e12\u202c}",
    "half of a surrogate pair": "\\boxed{\ud800}",
    "combining marks": "2" + "\u0301" * 100_000,
    "code": "__import__('os').system('touch /tmp/owned')",
}


SOME = [
    "a power tower",
    "a megabyte of digits",
    "a nest of parentheses",
    "a null byte",
    "half of a surrogate pair",
]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("numeric", list(HOSTILE)),
        ("math", SOME),
        pytest.param("math", [kind for kind in HOSTILE if kind not in SOME], marks=pytest.mark.slow),
    ],
    ids=["numeric", "math", "math, the others"],
)
def test_a_hostile_answer_costs_its_sample_at_most_and_never_the_batch(runner, name, kinds):
    options, seconds = {"math": (MathOptions(), 1.0), "numeric": (NumericOptions(), 10.0)}[name]
    one = runner(name, options, timeout_seconds=seconds)
    found = check(one, name, [HOSTILE[kind] for kind in kinds], (r"so \boxed{2}", "2"), 1.0)
    if name == "numeric":
        assert all(r.valid for r in found)  # wrong, and no failure
    elif "a power tower" in kinds:
        assert not found[kinds.index("a power tower")].valid
    assert not Path("/tmp/owned").exists()


# -- any text and any return at every reward of the plugin --------------------

FRAGMENTS = [
    *(
        "\\boxed{",
        "}",
        "{",
        "$",
        "\\frac{1}{",
        "^",
        "**",
        "9",
        "!",
        "(",
        ")",
        "\\sqrt",
        "\\sum",
        "x",
        "=",
        ",",
        ".",
        "/",
        "-",
    ),
    *(
        "\x00",
        "\u202e",
        "\u0663",
        "\u2167",
        "\uff12",
        "\u2212",
        "\u0301",
        "\U0001f600",
        "\ud800",
        "1e999",
        "inf",
        "nan",
    ),
    *(
        "<think>",
        "</answer>",
        "####",
        "```python\n",
        "\n```",
        "while 1: pass\n",
        "import os\n",
        "os._exit(0)\n",
        "\r\n",
    ),
]
TEXTS = st.one_of(
    st.text(max_size=80),
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.builds(lambda part, n: part * n, st.sampled_from(FRAGMENTS), st.integers(1, 20_000)),
)
TESTS = json.dumps({"inputs": [""], "outputs": ["2"]})
SANE = {  # options, a response with its answer, the reward
    "exact_match": (ExactMatchOptions(), ("<2>", "<2>"), 1.0),
    "numeric": (NumericOptions(), ("so 2", "2"), 1.0),
    "math": (MathOptions(), (r"so \boxed{2}", "2"), 1.0),
    "format": (FormatOptions(), ("<think>.</think><answer>2</answer>", "2"), 1.0),
    "length": (LengthOptions(max_tokens=10, buffer_tokens=5), ("2", "2"), 0.0),
    "code": (CodeOptions(test_timeout_seconds=2.0), ("```python\nprint(2)\n```", TESTS), 1.0),
}
FIXED = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SANE)
def test_any_text_has_a_finite_reward_or_a_counted_failure_and_leaves_its_neighbours(runner, name):
    options, sane, value = SANE[name]
    one = runner(name, options, timeout_seconds=10.0 if name == "code" else 1.0)

    @settings(FIXED, max_examples=30)
    @given(st.lists(TEXTS, min_size=1, max_size=3))
    def scored(hostile):
        check(one, name, hostile, sane, value)

    scored()


RETURNS = """
import os, sys, time
import numpy, torch

THINGS = {
    "nan": lambda: float("nan"), "inf": lambda: numpy.float32("inf"), "text": lambda: "1.0", "list": lambda: [1.0],
    "empty": lambda: {}, "nothing": lambda: None, "bool": lambda: True, "huge": lambda: 10**400,
    "complex": lambda: 1j, "dict": lambda: {"score": float("nan"), "pred": "x" * 10**6}, "odd": lambda: {"score": "1"},
    "array": lambda: numpy.ones(3), "scalar": lambda: torch.tensor(0.5), "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit("enough"), "_exit": lambda: os._exit(0), "abort": os.abort, "hang": lambda: time.sleep(60),
    "fork": lambda: time.sleep(60) if os.fork() == 0 else 0.25, "stack": lambda: THINGS["stack"](),
    "noise": lambda: print("x" * 10**6) or 0.5, "close": lambda: os.closerange(0, 3) or 0.5,
}


def score(completion):
    return THINGS[completion]() if completion in THINGS else 1.0
"""
THINGS = re.findall(r'"(\w+)": (?:lambda|os)', RETURNS)


@pytest.mark.slow
def test_whatever_a_function_returns_or_does_is_a_finite_reward_or_a_counted_failure(runner, tmp_path):
    (tmp_path / "mine.py").write_text(RETURNS)
    options = PythonOptions(path="mine.py", allow_local_code=True)
    one = runner("python", options, tmp_path, timeout_seconds=2.0)
    found = check(one, "python", THINGS, ("sane", "2"), 1.0)
    fine = {"bool": 1.0, "scalar": 0.5, "fork": 0.25, "noise": 0.5, "close": 0.5}
    assert {thing: r.rewards["python"] for thing, r in zip(THINGS, found, strict=True) if r.valid} == fine

    @FIXED
    @given(st.lists(st.sampled_from(sorted({*THINGS} - {"hang", "fork"})), min_size=1, max_size=4))
    def scored(things):
        check(one, "python", things, ("sane", "2"), 1.0)

    scored()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["scores", "errors", "0", "1"]), inner, max_size=3)
    ),
    max_leaves=8,
)
BODIES = st.one_of(
    JSON.map(json.dumps),
    st.builds(lambda score, errors: json.dumps({"scores": [score], "errors": errors}), JSON, JSON),
    st.text(max_size=50),
    st.sampled_from(["[" * 20_000, '{"scores":[1e999]}', '{"scores":[1],"scores":[2,3]}', "1" * 10_000]),
)


@pytest.mark.slow
def test_whatever_a_server_answers_is_a_finite_reward_or_a_counted_failure(runner, scorer_server):
    bodies = []

    def answer(handler, sent):
        (text,) = sent["completions"]
        handler.answer({"scores": [1.0]} if text == "sane" else bodies[int(text)].encode("utf-8", "replace"))

    one = runner("http", HTTPOptions(url=scorer_server(answer).url, batch_size=1), timeout_seconds=10.0)

    @settings(FIXED, max_examples=60)
    @given(st.lists(BODIES, min_size=1, max_size=5))
    def scored(drawn):
        bodies[:] = drawn
        check(one, "http", [str(i) for i in range(len(drawn))], ("sane", "2"), 1.0)

    scored()
