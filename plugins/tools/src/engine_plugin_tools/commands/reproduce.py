"""``engine manifest`` and ``engine reproduce``: what a run depends on in one file, and the same run from that file."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from engine_core.cli.loading import load_trainer
from engine_core.cli.options import AllowCode, Json, Run, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.errors import ConfigError
from engine_core.runs.tracking import RunFolder
from engine_plugin_tools.output_files import write_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_core.config import EngineConfig
    from engine_core.types import Rollout
    from engine_plugin_tools.manifest import Manifest

DIFFERS = 7
"""Exit code of a run whose numbers are not as recorded."""
TOKENS = "rollouts/tokens"
"""Name of the hash of a step's tokens among its numbers."""
MORE = 2.0  # a repeat may differ by so many times the band

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write (JSON).")]


def manifest(
    run: Run,
    out: Out,
    steps: Annotated[int, typer.Option("--steps", min=1, help="First steps whose metrics are kept.")] = 3,
    repeats: Annotated[
        list[str] | None,
        typer.Option(
            "--repeat", metavar="RUN", help="Another run of the same file: its differences are allowed."
        ),
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="Keep data files of up to 16 MiB, too.")] = False,
) -> None:
    """Write what a run depends on and what its first steps measured into one file.

    It holds the config, code files, hashes of data and models, versions, hardware, metrics and hashes of weights, without
    secrets. Write it on the machine of the run, before code and packages change.

    Example: engine manifest latest -o run.json

    Raises:
        ConfigError: the file exists.
    """
    from engine_plugin_tools.manifest import describe

    if out.exists():
        raise ConfigError(f"'{out}' exists already, and nothing is overwritten. Choose another name.")
    found = describe(RunFolder.open(run), steps, data, [RunFolder.open(other) for other in repeats or []])
    write_output(out, found.model_dump_json(indent=1))
    print(f"{out}: {len(found.steps)} steps, {len(found.inputs)} inputs, {len(found.packages)} packages")


def reproduce(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What 'engine manifest' wrote.")],
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps to train; default: those of the manifest.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the machine and the inputs; train nothing.")
    ] = False,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> int:
    """Train the first steps of a run again from its manifest, and say what is not as recorded.

    Prints what differs here before it trains: packages, hardware, lines of code, data, models. Files that are absent are
    taken from the manifest. No run folder is written. Exit code 7 when a number differs.

    Example: engine reproduce run.json --check
    """
    from engine_core.config.assemble import load_config
    from engine_plugin_tools.manifest import changed, read_manifest, settings_of

    recorded = read_manifest(file)
    given = {setting.partition("=")[0].strip() for setting in sets or ()}
    settings = settings_of(recorded, file.with_suffix(".files"), given, allow_code)
    config = load_config(settings, overrides=sets or (), allow_code=allow_code)
    rows = changed(recorded, config)
    if not as_json:
        print_table(rows, header=("ITEM", "RECORDED", "HERE"))
        print(f"{len(rows)} items are not as recorded." if rows else "Everything is as recorded.", flush=True)
    differing: dict[int, dict[str, Any]] = {}
    said = ""
    if not check:
        for step, found, first in train_again(recorded, config, steps):
            differing[step], said = found, said or first
            if not as_json:
                print(f"step {step}: {f'{len(found)} numbers differ' if found else 'equal'}", flush=True)
    step, found = next(((step, found) for step, found in differing.items() if found), (0, {}))
    if as_json:
        items = [dict(zip(("item", "recorded", "here"), row, strict=True)) for row in rows]
        numbers = [
            {"step": step, "number": name, "recorded": was, "here": now}
            for step, found in differing.items()
            for name, (was, now) in found.items()
        ]
        print_json({"changed": items, "steps": len(differing), "differences": numbers, "first": said})
    elif found:
        print_table(
            [(str(step), name, str(was), str(now)) for name, (was, now) in found.items()],
            header=("STEP", "NUMBER", "RECORDED", "HERE"),
        )
        print(said)
    return DIFFERS if found else 0


def train_again(
    recorded: Manifest, config: EngineConfig, steps: int | None
) -> Iterator[tuple[int, dict[str, tuple[Any, Any]], str]]:
    """Train the recorded steps, and yield each with the two values of what differs, by name, and the part that differs first.

    Numbers must be equal, or within twice the band of the manifest. Weights are compared in steps with a recorded checkpoint.
    """
    from engine_plugin_tools.manifest import hash_tokens, hash_weights, measured
    from engine_plugin_tools.replaying import first_difference, relative

    with closing(load_trainer(config)) as trainer:
        trainer.setup(training=True)
        sampled: list[Rollout] = []
        emit = trainer.emit

        def listen(event: str, data: Mapping[str, Any]) -> list[str]:
            """Keep the rollouts of the step."""
            sampled[:] = data.get("rollouts", sampled)
            return cast("list[str]", emit(event, data))

        trainer.emit = listen
        for step in range(1, (steps or max(recorded.steps)) + 1):
            trainer.begin_step(step)
            now, was = measured(trainer.step(step)), recorded.steps.get(step, {})
            trainer.step_done = step
            found: dict[str, tuple[Any, Any]] = {
                name: (was[name], now[name])
                for name in was
                if name in now and relative(was[name], now[name]) > MORE * recorded.band.get(name, 0.0)
            }
            if not recorded.band:
                hashes = dict(recorded.weights.get(step, {}))
                with tempfile.TemporaryDirectory() as folder:
                    if hashes:
                        trainer.save_roles(Path(folder))
                    here = hash_weights(Path(folder))
                if step in recorded.tokens:
                    hashes[TOKENS], here[TOKENS] = recorded.tokens[step], hash_tokens(sampled)
                pairs = {name: (hashed[:12], here.get(name, "-")[:12]) for name, hashed in hashes.items()}
                found |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
            yield step, found, first_difference(found, trainer.optimizer_steps_per_step)
