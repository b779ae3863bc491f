"""What Ray costs: the same GRPO run on ``torchrun`` and on ``ray`` in turn, with an interval of the ratio of their steps.

    python benchmarks/ray/run.py --rounds 6 --out benchmarks/ray/results
    python benchmarks/ray/run.py --device cuda --budget 250 --out benchmarks/ray/results

On the CPU a random model on sums: actor and sampler in one process (``--split``: in two, so that weights cross). Runs alternate, and
each round starts both anew. ``--device cuda`` is a model of a published shape under FSDP on two GPUs with the
sampler in the same processes; both runs stay alive there and take turns step by step, which a machine with cores to
spare can bear. Needs an idle machine: other work is measured too. ``ray.json`` is written after each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratio import ratio
from session import KINDS, Failed, Session
from world import of_runtime, sums, words

BACKENDS = ("torchrun", "ray")
CALLS = 300
SPARE_SECONDS = 25.0  # of the budget, for the end of runs
LANES = {
    "cpu": {"rounds": 3, "steps": 10, "prompts": 8, "response": 32, "turns": "runs"},
    "cuda": {"rounds": 6, "steps": 5, "prompts": 16, "response": 96, "turns": "steps"},
}
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

Step = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Of the command line; what a lane has a value of its own for is filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--device", choices=tuple(LANES), default="cpu", help="the lane; cuda: on GPUs where there are some"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="of each run in a round, that are counted")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a run that are not counted")
    parser.add_argument("--turns", choices=("runs", "steps"), help="what alternates within a round")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--response", type=int, help="tokens of a response")
    parser.add_argument("--hidden", type=int, default=128, help="of the model on sums")
    parser.add_argument("--split", action="store_true", help="actor and sampler in processes of their own")
    parser.add_argument("--shape", default="qwen3-0.6b", help="of the lane cuda; tiny: to try it out")
    parser.add_argument("--sampler", choices=("hf", "vllm"), default="hf", help="of the lane cuda")
    parser.add_argument("--processes", type=int, default=2, help="of the lane cuda")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for ray.json")
    given = parser.parse_args()
    for name, value in LANES[given.device].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.split and given.device == "cuda":
        parser.error("--split is of the lane cpu")
    return given


class Comparison:
    """Both runtimes on the same work.

    Args:
        given: of the command line.
        folder: for files of the runs.
    """

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.deadline = time.monotonic() + given.budget - min(SPARE_SECONDS, given.budget / 4)
        self.rounds: list[dict[str, list[Step]]] = []
        self.starts: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        self.calls: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        self.failure = ""
        made = words if given.device == "cuda" else sums
        self.config = made(folder, given)

    def measure(self) -> Iterator[int]:
        """Yields after each round; ends early where a run fails or the time is up."""
        try:
            yield from self._by_steps() if self.given.turns == "steps" else self._by_runs()
        except Failed as error:
            self.failure = str(error)

    def _by_runs(self) -> Iterator[int]:
        for number in range(self.given.rounds):
            began, found = time.monotonic(), {}
            for backend in order(number):
                with self._session(backend, number) as session:
                    found[backend] = [session.step() for _ in range(self.given.steps)]
            self.rounds.append(found)
            yield number
            if time.monotonic() + 1.1 * (time.monotonic() - began) > self.deadline:
                return

    def _by_steps(self) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            sessions = {backend: stack.enter_context(self._session(backend, 0)) for backend in BACKENDS}
            for number in range(self.given.rounds):
                began = time.monotonic()
                found: dict[str, list[Step]] = {backend: [] for backend in BACKENDS}
                for turn in range(self.given.steps):
                    for backend in order(number + turn):
                        found[backend].append(sessions[backend].step())
                self.rounds.append(found)
                yield number
                if time.monotonic() + 1.1 * (time.monotonic() - began) > self.deadline:
                    return

    @contextlib.contextmanager
    def _session(self, backend: str, number: int) -> Iterator[Session]:
        """A run that is warm."""
        config = of_runtime(self.config, self.given, backend)
        session = Session(self.folder, f"{backend}{number}", config, self.deadline)
        try:
            for _ in range(self.given.warmup):
                session.step()
            self.starts[backend].append(session.start_seconds)
            self.calls[backend].append(session.calls(CALLS))
            yield session
        finally:
            session.close()

    def result(self) -> dict[str, Any]:
        """What is known so far."""
        found: dict[str, Any] = {
            "arguments": {key: str(value) for key, value in vars(self.given).items() if key != "out"},
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "failure": self.failure,
        }
        for backend in BACKENDS:
            steps = [step for each in self.rounds for step in each[backend]]
            found[backend] = {
                "step_seconds": middle([step["seconds"] for step in steps]),
                "start_seconds": middle(self.starts[backend]),
                "call_seconds": middle(self.calls[backend]),
                "cpu_seconds_of_a_step": {
                    kind: sum(step["cpu"][kind] for step in steps) / max(len(steps), 1) for kind in KINDS
                },
                "steps": [[step["seconds"] for step in each[backend]] for each in self.rounds],
            }
        if self.rounds:
            first, second = BACKENDS
            pairs = [(each[first], each[second]) for each in self.rounds]
            found["same_work"] = all(
                self._alike(a["work"], b["work"])
                for one, other in pairs
                for a, b in zip(one, other, strict=True)
            )
            found["wall"] = ratio([(seconds(one), seconds(other)) for one, other in pairs])
            found["cpu"] = ratio([(cpu(one), cpu(other)) for one, other in pairs])
        return found

    def _alike(self, one: dict[str, float], other: dict[str, float]) -> bool:
        """Bit for bit on the CPU; GPUs sum in another order, so that samples drift apart, of the same length."""
        names = one if self.given.device == "cpu" else ["response_length/mean"]
        return all(one[name] == other[name] for name in names)


def order(number: int) -> tuple[str, ...]:
    """Who is first changes, so that a machine that changes its pace does so for both."""
    return BACKENDS if number % 2 == 0 else BACKENDS[::-1]


def middle(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def seconds(steps: list[Step]) -> list[float]:
    return [step["seconds"] for step in steps]


def cpu(steps: list[Step]) -> list[float]:
    """CPU seconds of a step, of all processes; one number: the clock of processes is coarse."""
    return [max(sum(sum(step["cpu"].values()) for step in steps) / len(steps), 1e-9)]


def show(found: dict[str, Any]) -> None:
    """A short table."""
    for backend in BACKENDS:
        mine = found[backend]
        if mine["step_seconds"] is None:
            continue
        spent = ", ".join(
            f"{kind} {value:.3f}" for kind, value in mine["cpu_seconds_of_a_step"].items() if value
        )
        print(
            f"{backend:9} step {mine['step_seconds']:.4f} s, start {mine['start_seconds']:.1f} s, "
            f"call {1000 * mine['call_seconds']:.2f} ms; CPU seconds of a step: {spent}"
        )
    for what in ("wall", "cpu"):
        if what in found:
            known = found[what]
            sure = f" (95%: {known['low']:.4f} to {known['high']:.4f})" if known["low"] else ""
            print(f"{what:9} ray / torchrun: {known['ratio']:.4f}{sure} over {len(known['rounds'])} rounds")
    if "same_work" in found:
        print(
            f"same work: {found['same_work']}; load of the machine: {found['load']:.1f} on {found['cores']} cores"
        )
    if found["failure"]:
        print(f"ended early: {found['failure']}")


def main() -> None:
    """Measure, and say what came out."""
    given = arguments()
    if given.device == "cuda":
        for name, value in MULTICAST_OFF.items():
            os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as name:
        comparison = Comparison(given, Path(name))
        for _ in comparison.measure():
            write(given.out, comparison.result())
        found = comparison.result()
    write(given.out, found)
    show(found)
    raise SystemExit(0 if comparison.rounds else 1)


def write(folder: Path | None, found: dict[str, Any]) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ray.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
