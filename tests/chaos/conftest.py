"""Real ``engine`` processes that start in a tenth of a second, and a run so small that a step takes milliseconds.

``engine("train", "run.toml", ...)`` runs a command in a process of its own, in the test's folder, and
returns how it ended; ``engine.start`` does not wait. Whatever a test does, no process of its survives it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

MARK = "ENGINE_CHAOS_TEST"
"""Environment variable by which the processes of one command are known, whatever their parents."""
PATIENCE = 60.0  # seconds to wait for what must come; only a hang takes that long


class Server:
    """The fork server, started once; see ``server.py``."""

    def __init__(self) -> None:
        room = "-" * 200  # a fork shows its command in the place of its server's
        command = [sys.executable, "-P", str(Path(__file__).with_name("server.py")), room]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=environment)
        self.codes: dict[int, int] = {}
        self._started: list[int] = []
        self._pending = b""
        self._listen(lambda: self._ready, 4 * PATIENCE)

    _ready = False

    def fork(self, **request) -> int:
        """Start a child; returns its pid."""
        before = len(self._started)
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(request).encode() + b"\n")
        self._listen(lambda: len(self._started) > before, PATIENCE)
        return self._started[-1]

    def wait(self, pid: int, timeout: float) -> int:
        """The return code of a child."""
        self._listen(lambda: pid in self.codes, timeout)
        return self.codes[pid]

    def ended(self, pid: int) -> bool:
        """Whether a child has ended by now."""
        self._read(0.0)
        return pid in self.codes

    def _listen(self, until, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer of the fork server in {timeout:g} s")
            self._read(deadline - time.monotonic())

    def _read(self, timeout: float) -> None:
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], max(timeout, 0))[0]:
            return
        data = os.read(self.popen.stdout.fileno(), 1 << 16)
        assert data, "the fork server has ended"
        *lines, self._pending = (self._pending + data).split(b"\n")
        for answer in map(json.loads, lines):
            if "ended" in answer:
                self.codes[answer["ended"]] = answer["code"]
            elif "started" in answer:
                self._started.append(answer["started"])
            else:
                self._ready = True
                assert answer["threads"] == 1, "a fork of a process with threads is not a fresh one"

    def close(self) -> None:
        self.popen.stdin.close()
        self.popen.wait(PATIENCE)
        self.popen.stdout.close()


@dataclass
class Process:
    """One command, running or ended. ``code`` is None while it runs, negative after a signal."""

    server: Server
    pid: int
    mark: str
    out_path: Path
    err_path: Path

    @property
    def code(self) -> int | None:
        return self.server.codes.get(self.pid) if self.server.ended(self.pid) else None

    @property
    def out(self) -> str:
        return self.out_path.read_text("utf-8")

    @property
    def err(self) -> str:
        return self.err_path.read_text("utf-8")

    def wait(self, timeout: float = PATIENCE) -> Process:
        self.server.wait(self.pid, timeout)
        return self

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def until(self, condition, what: str, patience: float = PATIENCE) -> None:
        """Wait until something is true of the running process; it must not end before."""
        deadline = time.monotonic() + patience
        while not condition():
            assert self.code is None, f"ended with {self.code} before: {what}\n{self.err[-3000:]}"
            assert time.monotonic() < deadline, f"in vain: {what}\n{self.err[-3000:]}"
            time.sleep(0.01)

    def family(self) -> list[psutil.Process]:
        """Its group and whatever carries its mark, itself left out."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE
                if ours and (os.getpgid(process.pid) == self.pid or process.environ().get(MARK) == self.mark):
                    found.append(process)
            except (psutil.Error, OSError):  # it has just gone, or is somebody else's
                continue
        return found

    def orphans(self, patience: float = 10.0) -> list[str]:
        """What is left of it some seconds after its end, as command lines; empty as it should be."""
        assert self.code is not None
        deadline = time.monotonic() + patience
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [" ".join(process.cmdline()).rstrip() or str(process.pid) for process in left]

    def kill(self) -> None:
        """End it and all that belongs to it."""
        for process in self.family():
            process.kill()
        if self.code is None:
            self.send(signal.SIGKILL)
            self.wait()


@dataclass
class Engine:
    """Starts ``engine`` commands in one folder.

    ``ENGINE_FAULT`` and other variables are given as ``env``; what the test process has of ours is not
    passed on.
    """

    server: Server
    folder: Path
    started: list[Process] = field(default_factory=list)

    def start(self, *argv, env=None, cwd=None, prelude=None) -> Process:
        """Start a command.

        Args:
            argv: after ``engine``.
            env: added to a plain environment.
            cwd: default: the test's folder.
            prelude: Python text that the process runs first.
        """
        mark = uuid.uuid4().hex
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
        whole = kept | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", MARK: mark} | (env or {})
        logs = self.folder / "started"
        logs.mkdir(exist_ok=True)
        out, err = (logs / f"{len(self.started)}.{name}" for name in ("out", "err"))
        script = None
        if prelude:
            script = logs / f"{len(self.started)}.py"
            script.write_text(prelude)
        for file in (out, err):
            file.touch()
        pid = self.server.fork(
            argv=[str(word) for word in argv],
            env=whole,
            cwd=str(cwd or self.folder),
            stdout=str(out),
            stderr=str(err),
            prelude=str(script) if script else None,
        )
        self.started.append(Process(self.server, pid, mark, out, err))
        return self.started[-1]

    def __call__(self, *argv, **settings) -> Process:
        """Run a command to its end; nothing may be left of it."""
        process = self.start(*argv, **settings).wait()
        assert process.orphans() == []
        return process


@pytest.fixture(scope="session")
def server():
    """The fork server of the session."""
    found = Server()
    yield found
    found.close()


@pytest.fixture
def engine(server, tmp_path):
    """``engine("train", "run.toml")`` in ``tmp_path``; whatever it leaves is ended after the test."""
    found = Engine(server, tmp_path)
    yield found
    for process in found.started:
        process.kill()


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory):
    """``model/`` (two layers of width 16, bytes as tokens), ``data/train.jsonl`` (24 rows), ``data/heldout.jsonl``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder / "model")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(letters),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    ).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, rows in (("train", range(24)), ("heldout", range(24, 28))):
        lines = [json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in rows]
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines))
    return folder


TINY_PLUGIN = '''
"""Rewards of the chaos tests; `bytes_share` has a spread for a random model."""
from engine_core import hookimpl
from engine_core.specs import Reward


def bytes_share(completions):
    return [sum(c.isascii() for c in text) / max(len(text), 1) for text in completions]


@hookimpl
def engine_rewards():
    return {"bytes_share": Reward(load=bytes_share)}
'''


def _toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


ONE_REWARD = '[[reward]]\nname = "bytes_share"\nworkers = 0\n'


@pytest.fixture(scope="session")
def tiny_plugin():
    """The code of the tiny run's plugin, for tests that add to it."""
    return TINY_PLUGIN


@pytest.fixture
def tiny(tiny_world, tmp_path):
    """Writes ``run.toml`` of a run ``runs/r`` of some tiny steps into the test's folder; returns its path.

    Args of what it returns: ``changes`` (keys with dots and values), ``reward`` (TOML), ``plugin`` (its code), ``folder``.
    """

    def write(changes=None, reward=ONE_REWARD, plugin=TINY_PLUGIN, folder=tmp_path):
        settings = {
            "model.path": str(tiny_world / "model"),
            "data.train": str(tiny_world / "data" / "train.jsonl"),
            "data.validation": str(tiny_world / "data" / "heldout.jsonl"),
            "data.prompts_per_step": 4,
            "rollout.group_size": 2,
            "rollout.max_response_tokens": 4,
            "actor.optim.lr": 1e-2,
            "run.name": "r",
            "run.steps": 4,
            "checkpoint.every_steps": 1,
            "tracking.trackers": [],
        } | (changes or {})
        lines = [
            'plugins = ["tiny.py"]',
            *(f"{key} = {_toml(value)}" for key, value in settings.items()),
        ]
        (folder / "tiny.py").write_text(plugin)
        path = folder / "run.toml"
        path.write_text("\n".join(lines) + "\n" + reward)
        return path

    return write


@pytest.fixture(scope="session")
def _straight_runs():
    return {}


@pytest.fixture
def straight(server, tiny, tmp_path_factory, _straight_runs):
    """``straight(changes)``: the `result` of that run when nothing happens to it; done once for all tests.

    ``write`` writes its files in place of ``tiny``; ``patience`` in seconds.
    """

    def run(changes=None, write=tiny, patience=PATIENCE, **files):
        key = json.dumps([changes, files, write.__qualname__], sort_keys=True)
        if key not in _straight_runs:
            folder = tmp_path_factory.mktemp("straight")
            done = (
                Engine(server, folder).start("train", write(changes, **files, folder=folder)).wait(patience)
            )
            assert done.orphans() == []
            assert done.code == 0, done.err
            _straight_runs[key] = result_of(folder / "runs" / "r")
        return _straight_runs[key]

    return run


TIMED = ("time", "throughput/", "memory/", "sync/seconds", "data/worker_restarts")


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(TIMED)}


def result_of(run: Path) -> dict:
    """What a run came to, without times and paths: two runs that did the same are equal here bit for bit.

    ``metrics``: the lines; ``samples``: for each step the ids, tokens and rewards of its rollouts;
    ``files``: hashes of the newest checkpoint's weights, optimizer and random states; ``state``: its state.
    """
    from engine_core.runs.checkpoint import Checkpoints, problems, read_state
    from engine_core.runs.rollout_files import read_rollouts

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = {
        str(file.relative_to(run / "rollouts")): [
            (r.prompt.id, r.request_id, r.token_ids.tolist(), r.reward) for r in read_rollouts(file)
        ]
        for file in sorted((run / "rollouts").rglob("*.parquet"))
    }
    checkpoints = Checkpoints(run / "checkpoints")
    newest = checkpoints.path(checkpoints.steps()[-1])
    assert problems(newest) == []
    manifest = json.loads((newest / "manifest.json").read_text())
    state = {name: value for name, value in read_state(newest).items() if name not in ("config", "plugins")}
    state["metrics"] = without_times(state["metrics"])
    return {
        "metrics": [without_times(line) for line in lines],
        "samples": samples,
        "files": {name: entry for name, entry in manifest["files"].items() if name != "state.json"},
        "state": state,
    }


@pytest.fixture
def result(tmp_path):
    """``result()``: `result_of` the test's own run, as far as it has come."""
    return lambda: result_of(tmp_path / "runs" / "r")


@pytest.fixture
def metrics(tmp_path):
    """``metrics()``: the lines of ``metrics.jsonl`` of the test's own run."""

    def read():
        text = (tmp_path / "runs" / "r" / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    return read


# runs of two ranks

HERE = Path(__file__).parent
OF_RANKS = [
    HERE / "hurt_plugin.py",
    HERE / "hurt_engines.py",
    HERE.parent / "conformance" / "data_parallel_engine.py",
]
RANKS = {
    "plugins": ["hurt_plugin.py"],
    "actor.backend": "hurt",
    "rollout.backend": "hurt",
    "runtime.backend": "torchrun",
    "runtime.torchrun.processes": 2,
    "run.steps": 3,
    "eval.every_steps": 2,
}


@dataclass
class Hurting:
    """Hurts ranks of a run in a folder, by `hurt_engines.py`, and looks at how it ended."""

    folder: Path
    patience = 150.0  # seconds: two processes import torch

    def tell(self, hurt, folder=None):
        """Write ``hurt.json`` whole: ranks that run read it at any moment."""
        part = (folder or self.folder) / "hurt.part"
        part.write_text(json.dumps(hurt))
        part.rename(part.with_name("hurt.json"))

    def later(self, run, hurt):
        """Hurt a rank once there is a checkpoint."""
        self.from_first_checkpoint(run, hurt)
        run.until((self.folder / "done").exists, "the rank is hurt")

    def from_first_checkpoint(self, run, hurt):
        """The same, and do not wait for it."""
        run.until(lambda: list(self.folder.glob("runs/r/checkpoints/step_*1")), "a checkpoint")
        self.tell(hurt)

    def ended(self, process, times=1):
        """Wait for a command, of which nothing may be left; ``times`` that ranks are started in it."""
        process.wait(times * self.patience)
        assert process.orphans() == []
        return process

    def return_code(self, process):
        """As a shell gives it."""
        return 128 - process.code if process.code < 0 else process.code

    def lost(self, run, hurt, cause):
        """The run ended for this rank, and said so."""
        assert run.code == 6
        assert f"Lost worker {hurt[0]}[{hurt[1]}] on " in run.err
        assert cause in run.err
        assert f"last words of rank {hurt[1]}" in run.err
        assert "Traceback" not in run.err


@pytest.fixture
def hurting(tmp_path):
    """See ``Hurting``."""
    return Hurting(tmp_path)


@pytest.fixture
def ranks(tiny, hurting, tmp_path):
    """Writes a run file of two ranks and ``hurt.json``; returns the run file."""

    def write(changes=None, hurt=None, folder=tmp_path):
        path = tiny({**RANKS, **(changes or {})}, folder=folder)
        lines = [line for line in path.read_text().splitlines() if line != 'plugins = ["tiny.py"]']
        path.write_text("\n".join(lines) + "\n")
        for file in OF_RANKS:
            shutil.copy(file, folder)
        if hurt:
            hurting.tell(hurt, folder)
        return path

    return write


@pytest.fixture
def straight_ranks(straight, ranks, hurting):
    """The result of the run of two ranks to which nothing happens; done once. Takes changes of its run file."""
    return lambda changes=None: straight(changes, write=ranks, patience=hurting.patience)
