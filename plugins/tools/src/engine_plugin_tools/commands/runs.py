"""Commands that inspect or clean up an existing run: inspect, prune."""

from __future__ import annotations

import shutil
import sys
import tomllib
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.options import Json, Run
from engine_core.cli.output import print_json, print_table
from engine_core.config.models import CheckpointConfig
from engine_core.errors import DataError, did_you_mean
from engine_core.redaction import harmless
from engine_core.runs.checkpoint import Checkpoints
from engine_core.runs.rollout_files import step_of
from engine_core.runs.tracking import RunFolder, read_rollouts
from engine_core.types import sequences_of
from engine_plugin_tools.transcripts import transcript

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.types import Rollout


def rollouts(
    run: Run,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The step; default: the newest written.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--eval", help="Show those of the evaluation after that step.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most that many rollouts.")] = 8,
    as_json: Json = False,
) -> None:
    """Show the prompts, responses and rewards of one step.

    Example: engine inspect rollouts latest --step 20 --limit 4
    """
    folder = RunFolder.open(run)
    files = _evaluation_files(folder, step) if held_out else [_rollout_file(folder, step)]
    shown = sequences_of(rollout for file in files for rollout in read_rollouts(file, arrays=True))
    if as_json:
        print_json([_plain(rollout) for rollout in shown[:limit]])
        return
    for rollout in shown[:limit]:
        print(harmless(_text(rollout)))
    if len(shown) > limit:
        print(f"--- {len(shown) - limit} more; see --limit")


def metrics(
    run: Run,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Metrics, or their beginnings, such as reward/."),
    ] = None,
    count: Annotated[
        int,
        typer.Option("--columns", min=1, help="Show that many steps: the first, the last, and some between."),
    ] = 5,
    others: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="RUN", help="Show another run's values below; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the metrics of some steps of a run, or of several runs; the documentation explains them on the page Metrics.

    Example: engine inspect metrics latest reward/

    Raises:
        DataError: a run has finished no step, or no metric has such a name.
    """
    folders = [RunFolder.open(each) for each in (run, *(others or ()))]
    found = [_metrics_by_step(folder) for folder in folders]
    steps = sorted(set().union(*found))
    places = {round(i * (len(steps) - 1) / max(count - 1, 1)) for i in range(count)} if count > 1 else {-1}
    chosen = [steps[place] for place in sorted(places)]
    known = sorted({name for of_run in found for line in of_run.values() for name in line} - {"step", "time"})
    wanted = [name for name in known if not names or name.startswith(tuple(names))]
    if not wanted:
        raise DataError(
            f"{folders[0].path} has no metric '{' '.join(names or ())}'.{did_you_mean((names or [''])[0], known)}"
        )
    if as_json:
        lines = (
            {
                "run": str(folder.path),
                "step": step,
                **{name: of_run.get(step, {}).get(name) for name in wanted},
            }
            for folder, of_run in zip(folders, found, strict=True)
            for step in chosen
        )
        print_json(list(lines))
        return
    runs = [[folder.path.name] if others else [] for folder in folders]
    rows = [
        [name, *label, *(_shown(of_run.get(step, {}).get(name)) for step in chosen)]
        for name in wanted
        for label, of_run in zip(runs, found, strict=True)
    ]
    print_table(rows, ["step", *(["run"] if others else []), *map(str, chosen)])
    if len(chosen) < len(steps):
        print(f"{len(chosen)} of {len(steps)} steps. --columns shows more.", file=sys.stderr)


def _metrics_by_step(folder: RunFolder) -> dict[int, dict[str, float]]:
    lines = folder.read_metrics()
    if not lines:
        raise DataError(f"{folder.metrics_file} holds no metrics: the run has not finished a step.")
    return {int(line["step"]): line for line in lines}


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _text(rollout: Rollout) -> str:
    values = {name: "-" if value is None else f"{value:g}" for name, value in sorted(rollout.rewards.items())}
    parts = ", ".join(f"{name} {value}" for name, value in values.items())
    dropped = "" if rollout.valid else ", dropped"
    failed = f", episode failed ({rollout.failure})" if rollout.failure else ""
    return (
        f"--- {rollout.prompt.id} #{rollout.index}{_branch(rollout)}: reward {rollout.reward:g} ({parts}){dropped}{failed}\n{rollout.prompt.text}\n"
        f"{_response(rollout)}  [{rollout.finish_reason}, {rollout.response_length} tokens{_turns(rollout)}]"
    )


def _response(rollout: Rollout) -> str:
    """Return the policy's messages after ``>>>``, the others after ``<<<`` and their role, each with its note."""
    lines = []
    for entry in transcript(rollout):
        begin = ">>>" if entry.role == "assistant" else f"<<< {entry.role}:"
        lines.append(f"{begin} {entry.text}" + (f"  [{entry.note}]" if entry.note else ""))
    return "\n".join(lines)


def _branch(rollout: Rollout) -> str:
    number = rollout.request_id.partition("/")[2]
    return f" branch {number}" if number else ""


def _turns(rollout: Rollout) -> str:
    count = sum(message["role"] == "assistant" for message in rollout.messages)
    return f" in {count} turn{'s' if count > 1 else ''}" if count else ""


def _rollout_file(folder: RunFolder, step: int | None) -> Path:
    if step is not None:
        return folder.rollout_file(step)
    files = sorted(file for file in folder.rollouts_dir.glob("step_*.parquet") if step_of(file) is not None)
    if not files:
        every = (
            tomllib.loads(folder.config_file.read_text("utf-8"))
            .get("tracking", {})
            .get("rollouts_every_steps")
        )
        raise DataError(
            f"{folder.path} holds no rollouts. They are written after every step that is a multiple of "
            f"tracking.rollouts_every_steps, which is {every}. --eval shows those of evaluations."
        )
    return files[-1]


def _evaluation_files(folder: RunFolder, step: int | None) -> list[Path]:
    """Return the files of an evaluation, one for each of its sets; by default of the last one.

    Raises:
        DataError: there was no evaluation, or none after that step.
    """
    by_step: dict[int, list[Path]] = {}
    for file in sorted((folder.rollouts_dir / "eval").rglob("step_*.parquet")):
        if (of := step_of(file)) is not None:
            by_step.setdefault(of, []).append(file)
    if not by_step or step not in (None, *by_step):
        known = ", ".join(map(str, sorted(by_step))) or "none"
        raise DataError(f"{folder.path} holds no such evaluation. Evaluated after the steps: {known}.")
    return by_step[max(by_step) if step is None else step]


def _plain(rollout: Rollout) -> dict[str, Any]:
    return {
        "request_id": rollout.request_id,
        "prompt_id": rollout.prompt.id,
        "group_id": rollout.group_id,
        "index": rollout.index,
        "prompt": rollout.prompt.text,
        "response": rollout.text,
        "messages": [
            {"role": entry.role, "content": entry.text, **entry.facts}
            for entry in transcript(rollout)
            if rollout.messages
        ],
        "finish_reason": rollout.finish_reason,
        "response_tokens": rollout.response_length,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "valid": rollout.valid,
        "failure": rollout.failure,
        "columns": rollout.prompt.columns,
    }


def prune(
    run: Run,
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="Checkpoints that stay.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would go.")] = False,
) -> None:
    """Delete old checkpoints, and what interrupted saves left behind; prints each folder that goes.

    The best ones stay, where the run's [checkpoint] names a best_metric.

    One that does not verify never counts as kept, and stays for a look.
    An active run is refused with exit code 5.

    Example: engine prune latest --keep 2 --dry-run
    """
    folder = RunFolder.open(run)
    settings = tomllib.loads(folder.config_file.read_text(encoding="utf-8")).get("checkpoint", {})
    config = CheckpointConfig.model_validate(settings)
    checkpoints = Checkpoints(folder.checkpoints, config, folder.metrics_of)
    with closing(folder):
        folder.lock()
        # of interrupted saves and deletions, and broken checkpoints that were replaced; a link is not a save's
        leftovers = sorted(path for path in checkpoints.folder.glob(".step_*") if not path.is_symlink())
        for path in [*checkpoints.prune(keep, dry_run, deep=True), *leftovers]:
            print(path)
        for path in leftovers if not dry_run else ():
            shutil.rmtree(path)
