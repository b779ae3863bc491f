"""Contracts of a runtime: random calls to all roles, and the phases of a step."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from engine_core.errors import ConfigError, DataError, PluginError, TrainingFailed
from engine_core.types import LossCall, StepOutput, TrainOutput
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.runtime_probe import METRICS, WEIGHTS, described

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_plugin_testing.runtime_bench import RuntimeBench

SEED, CALLS, PHASES = 8, 110, 12
ERRORS: dict[str, Any] = {
    "DataError": DataError,
    "ConfigError": ConfigError,
    "TrainingFailed": TrainingFailed,
    "MemoryError": (MemoryError, PluginError),
    "KeyError": (KeyError, PluginError),
}
TRAINERS, SAMPLER = ("actor", "ref"), "rollout"
IGNORED = ("sleep", "wake")  # what other contracts test, and what comes between


class _Calls:
    """Random calls, what each rank must have logged of them, and what each must return.

    Attributes:
        expected: by role the methods and fields of the calls so far, equal on every rank; None for lengths that ranks share.
        checks: of calls whose results were not looked at yet.
    """

    def __init__(self, bench: RuntimeBench) -> None:
        self.bench, self.draws = bench, random.Random(SEED)
        self.runtime, self.groups, self.journal = bench.shared
        self.roles = (*TRAINERS, SAMPLER)
        self.before = {
            role: [len(lines) for lines in bench.written(self.journal, role)] for role in self.roles
        }
        numbers = [line["number"] for line in bench.written(self.journal, "actor", "optimizer_step")[0]]
        self.steps: int = numbers[-1] if numbers else 0
        self.expected: dict[str, list[tuple[str, dict[str, Any]]]] = {role: [] for role in self.roles}
        self.checks: list[tuple[str, Callable[[], None]]] = []
        self.logged: list[str] = []
        self.number = 0

    def run(self) -> None:
        """Make the calls, then compare results and logs."""
        kinds = {
            self.infer: 5, self.fail: 3, self.train: 3, self.step: 3, self.files: 2, self.push: 1, self.mix: 1, self.sample: 1,
        }  # fmt: skip
        for call in self.draws.choices(list(kinds), list(kinds.values()), k=CALLS):
            self.number += 1
            call()
            if self.draws.random() < 0.1:
                self.settle()
        self.settle()
        self.compare()

    def sent(self, role: str, method: str, check: Callable[[Any], None], *batch: Any, **plain: Any) -> None:
        """Send a call, and note the check of its result or of its error."""
        what = f"Seed {SEED}, call {self.number}: {role}.{method}({plain})"
        try:
            future = self.groups[role].call(method, *batch, **plain)
        except Exception as error:  # of a runtime that runs the call at once
            future = Future()
            future.set_exception(error)

        def look() -> None:
            """Check the result."""
            check(future)

        self.checks.append((what, look))

    def settle(self) -> None:
        """Check the results of the calls so far, in a random order.

        Raises:
            AssertionError: a result is wrong; names the call.
        """
        for what, check in self.draws.sample(self.checks, len(self.checks)):
            try:
                check()
            except Exception as error:
                text = str(error) if isinstance(error, AssertionError) else f"it raised {error!r}"
                raise AssertionError(f"{what}: {text}") from error
        self.checks.clear()

    def compare(self) -> None:
        """Compare what each rank has logged with what was sent to it."""
        for role in self.roles:
            ranks = [
                [(line["method"], line) for line in lines[count:] if line["method"] not in IGNORED]
                for lines, count in zip(
                    self.bench.written(self.journal, role), self.before[role], strict=True
                )
            ]
            for rank, lines in enumerate(ranks):
                found = [method for method, _ in lines]
                wanted = [method for method, _ in self.expected[role]]
                at = next(
                    (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
                    min(len(found), len(wanted)),
                )
                assert found == wanted, (
                    f"Seed {SEED}: {role}[{rank}] received {found[at - 2 : at + 3]} from call {at - 2} on; sent were "
                    f"{wanted[at - 2 : at + 3]}."
                )
                for number, ((method, line), (_, fields)) in enumerate(
                    zip(lines, self.expected[role], strict=True)
                ):
                    got = {name: line[name] for name in fields}
                    assert got == fields, (
                        f"Seed {SEED}: call {number} to {role}[{rank}], {method}, came with {got}; sent was {fields}."
                    )
        for text in self.logged:
            assert any(text in line for line in self.lines), (
                f"The warning that an engine logged does not reach the log: '{text}'."
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the lines of the engine's log in ``lines``."""
        self.lines: list[str] = []
        handler, logger = logging.Handler(), logging.getLogger("engine")
        handler.setLevel(logging.WARNING)
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    # -- calls --------------------------------------------------------------

    def infer(self) -> None:
        """Send a batch, at times a large one, to a role, whole or split."""
        role, split = self.draws.choice(TRAINERS), self.draws.choice(("all", "dp"))
        most = self.draws.choice((9, 9, 9, 9, 20_000))
        batch = self.bench.batch([self.draws.randint(1, most) for _ in range(self.draws.randint(1, 6))])
        batch.token_ids += self.draws.randint(0, 2**40)
        outputs = ["double"]
        if self.draws.random() < 0.3:
            self.logged.append(f"logged in call {self.number}")
            outputs.append(f"log:{self.logged[-1]}@{self.draws.randrange(self.bench.world_size)}")
        if self.bench.world_size == 1 or split == "all":
            self.expected[role].append(("infer", {"lengths": batch.lengths.tolist(), "what": outputs}))
        else:
            self.expected[role].append(("infer", {"what": outputs}))

        def check(future: Any) -> None:
            """Compare the doubled tokens."""
            found = future.result()["double"]
            assert torch.equal(found, batch.token_ids.double() * 2), (
                f"it returned {found} of {batch.token_ids}"
            )

        self.sent(role, "infer", check, batch, split=split, outputs=tuple(outputs))

    def fail(self) -> None:
        """Send a call that raises an error on one rank."""
        role, kind = self.draws.choice(TRAINERS), self.draws.choice(list(ERRORS))
        outputs = ("double", f"raise:{kind}@{self.draws.randrange(self.bench.world_size)}")
        batch = self.bench.batch([self.draws.randint(1, 9) for _ in range(4)])
        self.expected[role].append(("infer", {"what": list(outputs)}))

        def check(future: Any) -> None:
            """Expect the error."""
            error = future.exception()
            assert isinstance(error, ERRORS[kind]), f"it raised {error!r}; expected {kind}"
            assert "requested failure" in str(error), f"it raised {error!r}"

        self.sent(role, "infer", check, batch, outputs=outputs)

    def train(self) -> None:
        """Send a batch with a loss."""
        value = self.draws.random()
        options = {"found": value, "clip": self.draws.choice((None, 0.2, (0.1, 0.3))), "n": self.number}
        loss = LossCall(
            self.draws.choice(("policy", "value")), options, self.draws.choice(((), ("entropy",)))
        )
        batch = self.bench.batch([self.draws.randint(1, 9) for _ in range(4)])
        self.expected["actor"].append(("forward_backward", {}))

        def check(future: Any) -> None:
            """Compare the output."""
            found, wanted = future.result(), TrainOutput(value, dict(METRICS), 3)
            assert described(found) == described(wanted), f"it returned {found}; expected {wanted}"

        self.sent("actor", "forward_backward", check, batch, loss=loss)

    def step(self) -> None:
        """Send an optimizer step."""
        self.steps += 1
        self.expected["actor"].append(("optimizer_step", {"number": self.steps}))

        def check(future: Any) -> None:
            """Compare the output."""
            found, wanted = future.result(), StepOutput(float("inf"), 0.25, True)
            assert described(found) == described(wanted), f"it returned {found}; expected {wanted}"

        self.sent("actor", "optimizer_step", check)

    def files(self) -> None:
        """Send a call that names a folder."""
        method, role = self.draws.choice(("load", "export", "save")), self.draws.choice(TRAINERS)
        folder = self.bench.folder / f"files-{self.number}"
        plain = {"adapter": True} if method == "export" and self.draws.random() < 0.5 else {}
        self.expected[role].append((method, {"folder": str(folder), **plain}))

        def check(future: Any) -> None:
            """Wait for the result, and for the files of ``save``."""
            found = future.result()
            found = found.result() if method == "save" else found
            assert found is None, f"it returned {found}"

        self.sent(role, method, check, folder=folder, **plain)

    def push(self) -> None:
        """Push the actor's weights, which are those after the steps that were sent before."""
        version, digest = self.number + 1000, hashlib.sha256()
        for name, size in WEIGHTS.items():
            digest.update(
                name.encode() + (torch.arange(size, dtype=torch.float32) + self.steps).numpy().tobytes()
            )
        found = self.runtime.push_weights("actor", SAMPLER, version)
        assert (found.version, found.checksum) == (version, digest.hexdigest()), (
            f"Seed {SEED}, call {self.number}: a push returned {found}; expected version {version} and the weights after "
            f"step {self.steps}."
        )
        self.expected[SAMPLER].append(
            ("update_weights", {"version": version, "checksum": digest.hexdigest()})
        )

    def mix(self) -> None:
        """Mix the actor's weights into those of the reference."""
        share = self.draws.random()
        self.runtime.mix_weights("actor", "ref", share)
        sums = [
            float((torch.arange(size, dtype=torch.float32) + self.steps).sum()) for size in WEIGHTS.values()
        ]
        self.expected["ref"].append(("load_named_weights", {"mix": share, "sums": sums}))

    def sample(self) -> None:
        """Sample, and leave the calls of samplers out of the comparison, because requests are shared out."""
        requests = self.bench.requests(self.draws.randint(1, 6))
        found = self.groups[SAMPLER].call("generate", requests=requests).result()
        assert [rollout.request_id for rollout in found] == [request.id for request in requests], (
            f"Seed {SEED}, call {self.number}: {found}"
        )
        self.before[SAMPLER] = [len(lines) for lines in self.bench.written(self.journal, SAMPLER)]
        self.expected[SAMPLER].clear()


@contract(
    catches=(
        "a call carried out twice",
        "an argument lost on its way",
        "an error raised again by the next call",
        "the share of a mix lost",
    )
)
def random_calls_reach_every_engine_as_sent(bench: RuntimeBench) -> None:
    """Random calls to all roles, sent without waiting, reach each rank once, in order and with their arguments.

    Each call returns its own result or raises its own error. Pushed and mixed weights are those after the steps that were
    sent before. What an engine logs reaches the controller's log.
    """
    calls = _Calls(bench)
    with calls.reading():
        calls.run()


@contract(
    option="offload_idle_roles",
    catches=(
        "trainers asleep while they train",
        "the weights of idle samplers not kept",
    ),
)
def a_phase_wakes_what_it_needs(bench: RuntimeBench) -> None:
    """Engines that a phase does not need are asleep in it with ``offload_idle_roles``, and the others are awake.

    The trainers are awake to train, the samplers to sample. Weights are kept, because they are pushed. ``traded_seconds``
    grows.
    """
    runtime, _, journal = bench.shared
    assert bench.offloads
    draws, traded = random.Random(SEED), runtime.traded_seconds
    asleep: dict[str, bool] = {}
    for phase in ["generate", "train", *draws.choices(("generate", "reward", "train", "sync"), k=PHASES)]:
        with runtime.phase(phase):
            if phase in ("generate", "train"):
                asleep = dict.fromkeys(TRAINERS, phase == "generate") | {SAMPLER: phase == "train"}
            for role, sleeps in asleep.items():
                for rank, lines in enumerate(bench.written(journal, role)):
                    last = [line for line in lines if line["method"] in ("sleep", "wake")][-1:]
                    found = [(line["method"], line.get("keep"), line.get("only")) for line in last]
                    wanted = ("sleep", ["weights"], None) if sleeps else ("wake", None, None)
                    assert found == [wanted], (
                        f"Phase {phase}: the last call of {role}[{rank}] is {found}; expected {wanted}."
                    )
        assert runtime.traded_seconds >= traded, "traded_seconds falls."
        traded = runtime.traded_seconds
    assert traded > 0, "traded_seconds is 0 after offloading."
    with runtime.phase("train"):  # as the other contracts expect
        pass


@contract(catches=("the memory of this process reported",))
def memory_is_reported_for_every_role(bench: RuntimeBench) -> None:
    """``memory_metrics`` has values above 0 for each role of worker processes, and none if all are in this process."""
    runtime, _, _ = bench.shared
    found = runtime.memory_metrics()
    if runtime.in_process:
        assert found == {}, f"Memory of this process is reported as that of workers: {found}."
        return
    for role in (*TRAINERS, SAMPLER):
        values = [value for name, value in found.items() if name.startswith(f"memory/{role}/")]
        assert values, f"No memory of '{role}' is reported: {sorted(found)}."
        assert max(values) > 0, f"The memory of '{role}' is {found}."
