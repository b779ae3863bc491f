"""The bench of runtimes: a runtime as a run starts it, with engines that log what reaches them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from engine_core.config.assemble import load_config, plugins_for
from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
from engine_core.plugins.plugin_set import PluginSet
from engine_core.types import Batch, Prompt, Request, Sampling
from engine_plugin_testing import reference, runtime_probe

IDLE = 4  # optimizer steps in which the role "ref" is not trained
ROLES = {
    "actor": Role("train"),
    "ref": Role("train", trainable=False, idle_steps=IDLE),
    "rollout": Role("rollout"),
}
TOTAL_STEPS = 10  # of the run
SEED = 20_261  # `run.seed`
ENDING = 10.0  # seconds within which processes end


Started = tuple[Runtime, dict[str, WorkerGroup], Path]
"""A runtime, its groups by role, and the folder in which its engines log."""


class RuntimeBench:
    """A bench with one runtime for many contracts; a contract that breaks the runtime starts another.

    Args:
        backend: name of the runtime.
        options: its table.
        plugins: files and names of plugins that offer it.
        plugin_options: their options, the tables ``[plugin.NAME]`` by name.
        world_size: number of ranks of the pool.
        root: folder of the test's file.
    """

    def __init__(
        self,
        backend: str,
        options: Mapping[str, Any],
        plugins: list[str],
        plugin_options: Mapping[str, Any],
        world_size: int,
        root: str,
    ) -> None:
        self.backend, self.options, self.plugins = backend, dict(options), plugins
        self.plugin_options = plugin_options
        self.world_size, self.root = world_size, root
        self.folder = Path(tempfile.mkdtemp(prefix="engine-runtime-"))
        self.tokenizer = reference.tokenizer()
        self.tokenizer.save_pretrained(self.folder / "model")
        config = json.dumps(dict(reference.SHAPE))  # no engine reads the model, so it has no weights
        (self.folder / "model" / "config.json").write_text(config)
        self._shared: Started | None = None
        self._plain = True  # whether every contract may use the shared runtime
        self._count = 0
        self.seed = 0  #: of torch in this process, after the last start
        self.before: tuple[Any, ...] = ()  #: what ``held`` returned before the last start

    def close(self) -> None:
        """End the shared runtime and remove the files."""
        self.end_shared()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_shared(self) -> None:
        """End the runtime that contracts share; the next contract starts another."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared[0].close()

    @property
    def shared(self) -> Started:
        """The runtime, groups and journals of all contracts that do not break them; its workers load the tokenizer."""
        if self._shared is None or not self._plain:
            self.end_shared()
            changes = {f"runtime.{self.backend}.offload_idle_roles": True} if self.offloads else {}
            self._shared = self._start(changes, {"tokenizer": self.tokenizer})
            self._plain = True
        return self._shared

    @property
    def offloads(self) -> bool:
        """Whether the runtime has the option ``offload_idle_roles``, with which the shared runtime is started."""
        plugins = PluginSet.load({"runtimes": {self.backend}}, self.plugins, Path(self.root))
        return "offload_idle_roles" in plugins.spec("runtimes", self.backend).config.model_fields

    @property
    def last(self) -> Started:
        """The runtime that was started last, for a contract that uses it up; it may have other pools, or be closed."""
        found = self._shared or self.shared
        self._plain = False
        return found

    def start_last(self, changes: Mapping[str, Any]) -> Started:
        """Start the runtime of ``last`` with these keys of the run file; the shared one is ended first."""
        self.end_shared()
        self._shared, self._plain = self._start(changes, {}), False
        return self._shared

    @contextmanager
    def started(self, changes: Mapping[str, Any] | None = None) -> Iterator[Started]:
        """Start a separate runtime for the contract and close it after the block; the shared one is ended first.

        Args:
            changes: keys of the run file, with their values.
        """
        self.end_shared()
        found = self._start(changes or {}, {})
        try:
            yield found
        finally:
            found[0].close()

    def make(
        self,
        changes: Mapping[str, Any],
        live: Mapping[str, Any],
        journal: Path,
        size: int,
    ) -> Runtime:
        """Build a runtime without starting it."""
        settings = {
            "plugins": [*self.plugins, runtime_probe.__file__],
            "plugin": self.plugin_options,
            "model.path": str(self.folder / "model"),
            "actor.backend": "probe",
            "actor.probe": {"folder": str(journal)},
            "ref.backend": "probe",
            "ref.probe": {"folder": str(journal)},
            "rollout.backend": "probe_sampler",
            "rollout.probe_sampler": {"folder": str(journal)},
            "rollout.weights": "own",
            "run.seed": SEED,
            "runtime.backend": self.backend,
            f"runtime.{self.backend}": self._options(size),
            **changes,
        }
        config = load_config(settings, allow_code=True)
        runtime: Runtime = plugins_for(config).resolve("runtimes", self.backend)(
            config, plugins_for(config), live
        )
        return runtime

    def _options(self, size: int) -> dict[str, Any]:
        return self.options if self.world_size == 1 and size == 1 else {**self.options, "processes": size}

    def _start(self, changes: Mapping[str, Any], live: Mapping[str, Any]) -> Started:
        journal = self.new_journal()
        pools = changes.get("placement.pools")
        size = sum(pools.values()) if pools else self.world_size
        with contextlib.chdir(self.root):
            self.before = self.held()
            runtime = self.make(changes, live, journal, size)
            try:
                groups = runtime.start(ROLES, TOTAL_STEPS)
                self.seed = torch.initial_seed()
                return runtime, groups, journal
            except BaseException:
                try:
                    self.check_closed(journal)  # by ``start`` itself
                finally:
                    runtime.close()  # twice, as a contract promises
                    runtime.close()
                raise

    def new_journal(self) -> Path:
        """Make a folder for what engines log."""
        self._count += 1
        self.journal.mkdir()
        return self.journal

    @property
    def journal(self) -> Path:
        """The folder of the runtime that was started last, also if its start failed."""
        return self.folder / str(self._count)

    # -- what contracts look at ---------------------------------------------

    def written(self, journal: Path, role: str, method: str = "") -> list[list[dict[str, Any]]]:
        """Return by rank the lines that a role logged: of ``method``, or all if it is empty."""
        found = []
        for file in sorted(journal.glob(f"{role}.*.jsonl"), key=lambda path: int(path.suffixes[0][1:])):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found.append([line for line in lines if method in ("", line["method"])])
        return found

    def check_closed(self, journal: Path) -> None:
        """Assert that every engine that was built is closed, once; or its process has ended before that."""
        for role in ROLES:
            for rank, lines in enumerate(self.written(journal, role)):
                built, closed = (
                    [line["pid"] for line in lines if line["method"] == what] for what in ("build", "close")
                )
                assert len(closed) <= len(built), f"{role}[{rank}] was closed {len(closed)} times."
                left = {pid for pid in built if pid not in closed}
                assert os.getpid() not in left, (
                    f"{role}[{rank}] was built in this process and never closed: what it holds is not freed."
                )
                assert self.gone(left), f"{role}[{rank}] was not closed, and its process still runs."

    def processes(self, journal: Path) -> set[int]:
        """Return the process ids of the ranks that logged a call."""
        return {line["pid"] for role in ROLES for lines in self.written(journal, role) for line in lines}

    def gone(self, pids: set[int]) -> bool:
        """Return whether these processes end within ``ENDING`` seconds."""
        deadline = time.monotonic() + ENDING
        while any(_runs(pid) for pid in pids - {os.getpid()}):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    @staticmethod
    def held() -> tuple[int, int, dict[str, str]]:
        """Return the numbers of open files and of threads of this process, and its environment variables."""
        gc.collect()
        own = psutil.Process()
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return own.num_fds(), own.num_threads(), variables

    @staticmethod
    def batch(lengths: list[int]) -> Batch:
        """Make sequences of these lengths in which no two tokens are the same."""
        return Batch(torch.arange(sum(lengths)), torch.tensor(lengths))

    @staticmethod
    def requests(count: int, **columns: Any) -> list[Request]:
        """Make requests with prompts of different lengths."""
        made = []
        for i in range(count):
            prompt = Prompt(f"p{i}", list(range(3 + i % 4)), "", dict(columns))
            made.append(Request(f"r{i}", prompt, Sampling(max_response_tokens=2 + i % 3, seed=i), i // 2, i))
        return made


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
