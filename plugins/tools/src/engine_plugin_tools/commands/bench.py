"""``engine bench``: the time and memory that the parts of a run take on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import load_trainer, read
from engine_core.cli.options import AllowCode, File, Json, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.config import EngineConfig

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
    """Forward, backward and optimizer step of the actor: tokens a second, MFU, memory.

    Tokens are random and the loss is on what follows the prompts. 'actor.max_tokens_per_rank' is the size
    of a micro-batch, as in a run. Raises an error if the prompts fill the sequences.

    Example: engine bench train run.toml --sequences 8 --length 96 --prompt 32 --steps 2 --warmup 1
    """
    from engine_plugin_tools.bench.parts import bench_train

    if prompt >= length:
        raise ConfigError(
            f"--prompt {prompt} leaves nothing of --length {length} to learn. Give a smaller one."
        )
    with read_shape(file, shape, sets, allow_code) as config:
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
    """Sampling: generated tokens a second.

    Example: engine bench rollout run.toml --prompts 4 --prompt 32 --response 16 --steps 2
    """
    from engine_plugin_tools.bench.parts import bench_rollout

    with read_shape(file, shape, sets, allow_code) as config:
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
    """Bringing the actor's weights to the sampler: seconds, bytes, bandwidth.

    Example: engine bench sync run.toml
    """
    from engine_plugin_tools.bench.parts import bench_sync

    with read_shape(file, shape, sets, allow_code) as config:
        _show(bench_sync(config, steps, warmup), as_json)


def step(
    file: File,
    steps: Steps = 5,
    warmup: Warmup = 2,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Whole steps of the run on its own data: seconds of each phase. Nothing is kept.

    Example: engine bench step run.toml --steps 2 --warmup 1
    """
    from engine_plugin_tools.bench.parts import bench_step

    _show(bench_step(read([file], sets=sets, allow_code=allow_code), steps, warmup, load_trainer), as_json)


@contextmanager
def read_shape(
    file: str, shape: str | None, sets: list[str] | None, allow_code: bool
) -> Iterator[EngineConfig]:
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
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:,.4g}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)
