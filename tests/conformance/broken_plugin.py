"""One plugin that offers every broken engine and reward, by the names of their classes and functions."""

import atexit
import os
import random
import re
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel

from engine_core import hookimpl
from engine_core.specs import Options, Reward, RolloutBackend, TrainBackend, TransportSpec
from engine_plugin_hf_rollout.plugin import HFOptions
from engine_plugin_processes.transports.table import TCPOptions
from engine_plugin_torch.options import TorchOptions

HERE = Path(__file__).parent
TRAIN = (
    "broken_train",
    "broken_runs",
    "broken_steps",
    "broken_shares",
    "broken_states",
    "broken_adapters",
    "broken_sequences",
    "broken_precision",
    "broken_options",
    "broken_kept",
)
HELD = []
sys.path.insert(0, str(HERE))


def classes_of(module):
    """The names of the engines, without importing them."""
    return re.findall(r"^class (\w+)\(", (HERE / f"{module}.py").read_text(), re.MULTILINE)


@hookimpl
def engine_train_engines():
    abilities = frozenset({"generation_module", "late_scale", "lora", "set_lr", "sleep", "support"})
    return {
        name: TrainBackend(load=f"{module}:{name}", config=TorchOptions, capabilities=abilities)
        for module in TRAIN
        for name in classes_of(module)
    }


@hookimpl
def engine_weight_transports():
    return {
        name: TransportSpec(load=f"broken_transport:{name}", config=TCPOptions)
        for name in classes_of("broken_transport")
    }


@hookimpl
def engine_rollout_engines():
    abilities = frozenset({"share_module", "pause", "sleep", "support", "partial"})
    return {
        name: RolloutBackend(load=f"{module}:{name}", config=HFOptions, capabilities=abilities)
        for module in ("broken_rollout", "broken_samplers", "broken_draws", "broken_workloads")
        for name in classes_of(module)
    }


def one_number(completions):
    return [float("4" in text) for text in completions][:1]


def draws(completion):
    return random.random()


def first_wins(completions):
    return [float(i == 0) for i in range(len(completions))]


def strips(completions):
    for i, text in enumerate(completions):
        completions[i] = text.strip(" .")
    return [float(text.endswith("4")) for text in completions]


def first_letter(completion):
    return float(completion[0] == "4")


def shifted(completions, answer):
    """Beyond the sixty-fourth the answer of the row before."""
    return [float(text == answer[i - (i >= 64)]) for i, text in enumerate(completions)]


def remembers(completion, answer, known={}):  # noqa: B006 (it is the fault)
    return known.setdefault(completion, float(completion == answer))


def tires(completion, answer, scored=[]):  # noqa: B006 (it is the fault)
    scored.append(completion)
    return float(completion == answer and len(scored) <= 100)


def first_row(completions, answer):
    return [float(text == answer[0 if len(completions) > 8 else i]) for i, text in enumerate(completions)]


def similar(completion, answer, known={}):  # noqa: B006 (it is the fault)
    return known.setdefault((completion.strip().lower(), answer), float(completion == answer))


def number_before(completion, answer, last=["0"]):  # noqa: B006 (it is the fault)
    last[0] = (re.findall("[0-9]+", completion) or last)[-1]
    return float(last[0] == answer)


def by_length(completions, answer):
    pairs = sorted(zip(completions, answer, strict=True), key=lambda pair: len(pair[0]))
    return [float(text == answer) for text, answer in pairs]


def locks(completion):
    """Locks a file until the process ends in order."""
    if not HELD:
        lock = Path(tempfile.gettempdir(), f"kit-lock-{os.getppid()}")
        lock.touch(exist_ok=False)
        HELD.append(atexit.register(lock.unlink, missing_ok=True))
    return float("4" in completion)


def unbounded(completion):
    return float(bool(completion)) if len(completion) < 100 else float(len(completion))


def reads_first(completion):
    """Reads the first number, and scores the last one."""
    return {"score": float(completion.split()[-1] == "4"), "pred": completion.split()[0]}


def scores_failures(completion):
    """0 where scoring fails."""
    return float(bool(completion) and completion != "fail")


def hides_delay(completions):
    """An error for a sample that came too late."""
    failures = {"fail": RuntimeError("no score"), "late": RuntimeError("no answer in 5 s")}
    return [failures.get(text, float(bool(text))) for text in completions]


class Undocumented(Options):
    most: int = 3


class Loose(BaseModel):
    """Takes any key."""


def short(completion, most=3):
    return float(len(completion) <= most)


@hookimpl
def engine_rewards():
    functions = (
        one_number,
        draws,
        first_wins,
        strips,
        first_letter,
        shifted,
        remembers,
        tires,
        first_row,
        similar,
        number_before,
        by_length,
        locks,
        unbounded,
        reads_first,
        scores_failures,
        hides_delay,
    )
    return {
        **{function.__name__: Reward(load=function) for function in functions},
        "undocumented": Reward(load=short, config=Undocumented),
        "loose": Reward(load=short, config=Loose),
    }
