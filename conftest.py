"""Fixtures of the tests of several distributions: tiny distributions, really installed; the command line on a tiny model."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

from engine_core.cli.main import main
from engine_core.plugins import metadata as plugin_metadata

settings.register_profile("untimed", deadline=None)  # other work on the machine may take longer
settings.load_profile("untimed")

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789+-*/=?.:"


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of every later look of the garbage collector: each takes 0.1 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """``install(name, {"rewards": {"x": "mod"}}, {"mod": source})``: a dist-info folder and modules on sys.path.

    Module names may be dotted; the packages above them are made. Everything is gone after the test.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules_before = set(sys.modules)

    def write(
        name: str,
        offers: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] = {},
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> Path:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = [
            f"[engine.{kind}]\n" + "".join(f"{offer} = {module}\n" for offer, module in names.items())
            for kind, names in offers.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in modules.items():
            path = site.joinpath(*module.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            for package in list(path.relative_to(site).parents)[:-1]:
                (site / package / "__init__.py").touch()
            path.with_suffix(".py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        plugin_metadata._read.cache_clear()
        return site

    yield write
    for name in set(sys.modules) - modules_before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def without_our_plugins(monkeypatch):
    """Whatever is installed where the tests run: as if only the core were."""
    everything = plugin_metadata.installed
    monkeypatch.setattr(
        plugin_metadata,
        "installed",
        lambda: tuple(o for o in everything() if not o.distribution.name.startswith("engine-plugin-")),
    )


@pytest.fixture
def forked_workers(monkeypatch) -> None:
    """Start the workers of pools and samplers as forks where ``ENGINE_TEST_FORK`` is set."""
    from engine_plugin_testing import forking

    if forking.wanted():
        from forked_workers import popen

        monkeypatch.setattr("subprocess.Popen", popen)


@pytest.fixture(autouse=True)
def forked_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the workers of rewards and of rows as forks where ``ENGINE_TEST_FORK`` is set, except in tests of faults."""
    if request.node.get_closest_marker("chaos"):
        return
    from engine_plugin_testing import forking

    if forking.wanted():
        import forked_children

        monkeypatch.setattr("engine_plugin_processes.child.subprocess", forked_children.Subprocess())


@pytest.fixture
def fresh_children(forked_children: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the workers of rewards and of rows as users have them, each as a fresh interpreter."""
    import subprocess

    monkeypatch.setattr("engine_plugin_processes.child.subprocess", subprocess)


class Answer(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def engine(capsys, tmp_path, monkeypatch) -> Callable[..., Answer]:
    """``engine("validate", "run.toml")`` in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Answer:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model folder with a character tokenizer and a config; its weights are random."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    folder = tmp_path_factory.mktemp("model")
    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def sft_run(tmp_path, tiny_model) -> Path:
    """``run.toml`` of a supervised run of two steps, 16 rows of data beside it."""
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"""
        trainer = "sft"
        [model]
        path = "{tiny_model}"
        [data]
        train = "rows.jsonl"
        validation = "rows.jsonl"
        prompts_per_step = 4
        [run]
        name = "first"
        steps = 2
        [checkpoint]
        every_steps = 1
        [tracking]
        trackers = []
        """
    path = tmp_path / "run.toml"
    path.write_text(textwrap.dedent(text))
    return path


DICE = '''
"""A rollout engine that throws dice, and a reward that likes digits."""

from engine_core import hookimpl
from engine_core.contracts.engines import RolloutEngine
from engine_core.specs import Reward, RolloutBackend
from engine_core.types import Rollout


class Dice(RolloutEngine):
    num_unfinished = 0
    queue = ()

    def add(self, requests):
        self.queue = list(requests)

    def step(self):
        done, self.queue = [self.throw(request) for request in self.queue], []
        return done

    def throw(self, request):
        import torch  # lazily imported: a worker of the reward loads this file, too

        generator = torch.Generator().manual_seed(request.sampling.seed)
        response = torch.randint(3, 40, (4,), generator=generator).tolist() + [1]
        prompt = request.prompt.token_ids
        mask = torch.tensor([False] * len(prompt) + [True] * len(response))
        return Rollout(
            request_id=request.id, prompt=request.prompt, token_ids=torch.tensor(prompt + response),
            loss_mask=mask, rollout_log_probs=-3.7 * mask.float(), policy_versions=self.version * mask.int(),
            finish_reason="stop", group_id=request.group_id, index=request.index,
            text=self.context.live["tokenizer"].decode(response, skip_special_tokens=True),
        )

    def abort(self, ids):
        return []

    def update_weights(self, stream, version):
        self.version = version
        for name, weights in stream:
            pass
        return "none"


def digits(completions):
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


@hookimpl
def engine_rollout_engines():
    return {"dice": RolloutBackend(load=Dice)}


@hookimpl
def engine_rewards():
    return {"digits": Reward(load=digits)}
'''


@pytest.fixture
def rl_run(tmp_path, sft_run) -> Path:
    """``rl.toml`` beside ``run.toml``: two steps of GRPO on rollouts that a one-file plugin makes up."""
    (tmp_path / "dice.py").write_text(DICE)
    text = """
        extends = ["run.toml"]
        trainer = "rl"
        plugins = ["dice.py"]
        [rollout]
        backend = "dice"
        group_size = 3
        max_log_prob_gap = 100.0
        [[reward]]
        name = "digits"
        [eval]
        max_prompts = 2
        """
    path = tmp_path / "rl.toml"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def grpo_run(tmp_path, sft_run) -> Path:
    """``grpo.toml`` next to ``run.toml``: two steps of GRPO with the sampler ``hf``, and a reward from ``reward.py``."""
    (tmp_path / "reward.py").write_text(
        "def digits(completions):\n    return [sum(c.isdigit() for c in text) / 8 for text in completions]\n\n\n"
        "def letters(completions):\n    return [sum(c.isalpha() for c in text) / 8 for text in completions]\n"
    )
    text = """
        extends = ["run.toml"]
        trainer = "rl"
        [rollout]
        group_size = 4
        max_response_tokens = 8
        [algorithm]
        loss = "reinforce"
        [[reward]]
        name = "python"
        [reward.python]
        path = "reward.py"
        function = "digits"
        allow_local_code = true
        """
    path = tmp_path / "grpo.toml"
    path.write_text(textwrap.dedent(text))
    return path
