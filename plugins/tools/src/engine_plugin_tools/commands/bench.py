"""``engine bench``: the time and memory that the parts of a run take on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import read, trainer_of
from engine_core.cli.options import AllowCode, File, Json, Sets
from engine_core.cli.output import print_json, print_table
from engine_plugin_tools.packages import require_package

if TYPE_CHECKING:
    from engine_core.config import EngineConfig

SIMULATED = (
    "engine-plugin-processes",
    "engine-plugin-rewards",
    "engine-plugin-trainers",
)  # extra [simulator]
Shape = Annotated[
    str | None,
    typer.Option(
        "--shape", metavar="NAME", help="Random weights of this shape instead of model.path: qwen3-0.6b, ..."
    ),
]
Steps = Annotated[
    int, typer.Option("--steps", min=1, metavar="N", help="Measured repetitions; medians are shown.")
]
Warmup = Annotated[int, typer.Option("--warmup", min=0, metavar="N", help="Repetitions before, not counted.")]
PromptTokens = Annotated[int, typer.Option("--prompt", min=1, metavar="N", help="Tokens of each prompt.")]


def train(
    file: File,
    shape: Shape = None,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Sequences of a mini-batch.")] = 64,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of each sequence.")] = 768,
    prompt: PromptTokens = 256,
    steps: Steps = 5,
    warmup: Warmup = 2,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Forward, backward and optimizer step of the actor: tokens a second, MFU, share of the floor, memory.

    Tokens are random and the loss is on what follows the prompts. 'actor.max_tokens_per_rank' is the size
    of a micro-batch, as in a run.
    """
    from engine_plugin_tools.bench.parts import bench_train, check_lengths

    check_lengths(length, prompt)
    with _config(file, shape, sets, allow_code) as config:
        _show(bench_train(config, sequences, length, prompt, steps, warmup), as_json)


def rollout(
    file: File,
    shape: Shape = None,
    prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="Prompts, each sampled group_size times.")
    ] = 64,
    prompt: PromptTokens = 256,
    response: Annotated[int, typer.Option("--response", min=1, help="Tokens of each response.")] = 512,
    steps: Steps = 3,
    warmup: Warmup = 1,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Sampling: generated tokens a second."""
    from engine_plugin_tools.bench.parts import bench_rollout

    with _config(file, shape, sets, allow_code) as config:
        _show(bench_rollout(config, prompts, prompt, response, steps, warmup), as_json)


def sync(
    file: File,
    shape: Shape = None,
    steps: Steps = 5,
    warmup: Warmup = 1,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Bringing the actor's weights to the sampler: seconds, bytes, bandwidth."""
    from engine_plugin_tools.bench.parts import bench_sync

    with _config(file, shape, sets, allow_code) as config:
        _show(bench_sync(config, steps, warmup), as_json)


def step(
    file: File,
    steps: Steps = 5,
    warmup: Warmup = 2,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Whole steps of the run on its own data: seconds of each phase. Nothing is kept."""
    from engine_plugin_tools.bench.parts import bench_step

    _show(bench_step(read([file], sets=sets, allow_code=allow_code), steps, warmup, trainer_of), as_json)


def simulate(
    workers: Annotated[
        list[int] | None,
        typer.Option("--workers", metavar="N", help="Devices, may be repeated; default 8, 16, 64."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            metavar="NAME",
            help="sync, early-stop, early-stop-rounds, async-1, async-2, async-4; default all.",
        ),
    ] = None,
    speeds: Annotated[
        str, typer.Option("--speeds", metavar="NAME", help="Of which model: qwen3-0.6b, qwen3-8b.")
    ] = "qwen3-8b",
    prompts: Annotated[
        float, typer.Option("--prompts", metavar="X", help="Of a step, for each worker.")
    ] = 2.0,
    group_size: Annotated[int, typer.Option("--group-size", min=1, help="Responses of a prompt.")] = 8,
    median: Annotated[float, typer.Option("--median", help="Tokens of a response: the median.")] = 300.0,
    p99: Annotated[float, typer.Option("--p99", help="The 99th percentile.")] = 4096.0,
    most: Annotated[int, typer.Option("--max-response-tokens", help="rollout.max_response_tokens.")] = 8192,
    trainer_share: Annotated[
        float, typer.Option("--trainer-share", metavar="X", help="Of the workers, where sampling runs ahead.")
    ] = 0.25,
    weights: Annotated[
        str, typer.Option("--weights", metavar="WAY", help="star: from one rank to each; relay: handed on.")
    ] = "relay",
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, metavar="N", help="Steps that count; of async-N best a multiple of N + 1."
        ),
    ] = 6,
    as_json: Json = False,
) -> None:
    """A run on many workers, in virtual time and without any: step time, who is idle, staleness, the controller's cost.

    The trainers, queues and threads are those of a run; only the workers are made up, from measured rates.
    """
    for package in SIMULATED:
        require_package(package, "simulator", "engine bench simulate")
    from engine_plugin_tools.bench.simulator.runs import Setting
    from engine_plugin_tools.bench.simulator.speeds import Lengths, speeds_of
    from engine_plugin_tools.bench.simulator.sweep import COLUMNS, about, every_mode, sweep, table

    setting = Setting(
        speeds=speeds_of(speeds),
        lengths=Lengths(median, p99, most),
        prompts_per_worker=prompts,
        group_size=group_size,
        trainer_share=trainer_share,
        weights=weights,
        steps=steps,
    )
    found = sweep(setting, workers or [8, 16, 64], mode or every_mode())
    if as_json:
        print_json({"setting": about(setting), "results": found})
    else:
        print_table(table(found), header=list(COLUMNS))


@contextmanager
def _config(file: str, shape: str | None, sets: list[str] | None, allow_code: bool) -> Iterator[EngineConfig]:
    """Yield the run file's config, with a model of ``shape`` if one is named."""
    from engine_plugin_tools.bench.shapes import write_shape

    with tempfile.TemporaryDirectory() as folder:
        config = read([file], sets=sets, allow_code=allow_code)
        if shape is not None:
            config.model.tokenizer = config.model.tokenizer or config.model.path
            config.model.path = write_shape(shape, Path(folder) / shape)
            config.model.override = {}
        yield config


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_table([(name, _text(value)) for name, value in found.items()])


def _text(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, (int, float))
        else str(value)
    )
