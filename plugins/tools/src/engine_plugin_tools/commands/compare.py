"""``engine compare``: two evaluations of the same prompts, prompt by prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.options import Json
from engine_core.cli.output import print_json, print_table
from engine_core.config.evaluation import UNNAMED
from engine_core.errors import DataError, did_you_mean
from engine_core.runs.rollout_files import read_rollouts
from engine_core.runs.tracking import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.types import Rollout
    from engine_plugin_tools.eval_metrics import Estimate

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="What 'engine eval --out' wrote (a folder or one of its files), or a run: its newest evaluation.",
    ),
]


def compare(
    first: Target,
    second: Target,
    score: Annotated[
        str | None,
        typer.Option("--score", metavar="REWARD", help="The reward to compare; default: the first of FIRST."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show by how much the first scores more than the second, with its 95% interval.

    The difference is taken on each prompt before it is averaged: what makes a prompt hard for both is not
    counted as uncertainty, so that smaller differences show than from two separate intervals. Evaluations without a
    common set raise an error.

    Example: engine compare after before
    """
    ours, theirs = evaluations(first), evaluations(second)
    if len(ours) == len(theirs) == 1:
        theirs = dict(zip(ours, theirs.values(), strict=True))
    common = [name for name in ours if name in theirs]
    if not common:
        raise DataError(
            f"'{first}' and '{second}' have no set in common: {', '.join(ours)} against {', '.join(theirs)}."
        )
    found = {name: paired(ours[name], theirs[name], score) for name in common}
    if as_json:
        print_json({name: {part: _as_json(e) for part, e in parts.items()} for name, parts in found.items()})
        return
    rows = [
        [name, *map(str, parts.values()), str(parts["difference"].prompts)] for name, parts in found.items()
    ]
    print_table(rows, ["set", "first", "second", "difference", "prompts"])


def _as_json(estimate: Estimate) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in dataclasses.asdict(estimate).items()}


def evaluations(target: str) -> dict[str, Path]:
    """Return the file of rollouts of each set.

    Raises:
        DataError: there is no evaluation at ``target``.
    """
    path = Path(target)
    if path.suffix == ".parquet":
        return {path.stem: path}
    if path.is_dir() and (files := sorted(path.glob("*.parquet"))):
        return {file.stem: file for file in files}
    folder = RunFolder.open(target).rollouts_dir / "eval"
    newest = {file.parent: file for file in sorted(folder.rglob("step_*.parquet"))}
    if not newest:
        raise DataError(
            f"'{target}' holds no evaluation. Write one with `engine eval {target} --out DIR`, and name DIR here."
        )
    return {UNNAMED if parent == folder else parent.name: file for parent, file in newest.items()}


def paired(first: Path, second: Path, score: str | None) -> dict[str, Estimate]:
    """Return the mean scores of both over their common prompts, and of the difference on each prompt.

    Raises:
        DataError: a file has no such score, or the two have no prompt in common.
    """
    from engine_plugin_tools.eval_metrics import mean_interval, score_interval

    read = [read_rollouts(file, arrays=True) for file in (first, second)]
    score = score or next((name for r in read[0] for name in r.rewards), "")
    ours, theirs = (_by_prompt(*each, score) for each in zip((first, second), read, strict=True))
    common = [prompt for prompt in ours if prompt in theirs]
    if not common:
        raise DataError(f"{first} and {second} have no prompt in common: they are evaluations of other rows.")
    scores = {"first": [ours[prompt] for prompt in common], "second": [theirs[prompt] for prompt in common]}
    means = [[fmean(each) for each in prompts] for prompts in scores.values()]
    differences = [a - b for a, b in zip(*means, strict=True)]
    return {name: score_interval(prompts) for name, prompts in scores.items()} | {
        "difference": mean_interval(differences)
    }


def _by_prompt(file: Path, rollouts: Sequence[Rollout], score: str) -> dict[tuple[Any, ...], list[float]]:
    """Return the scores of each prompt's responses; responses without a score are left out."""
    names = list(dict.fromkeys(name for r in rollouts for name in r.rewards))
    if score not in names:
        raise DataError(f"{file}: no rollout has the reward '{score}'.{did_you_mean(score, names)}")
    scores: dict[tuple[Any, ...], list[float]] = {}
    for rollout in rollouts:
        value = rollout.rewards.get(score)
        if value is not None:
            scores.setdefault(_key(rollout), []).append(value)
    return scores


def _key(rollout: Rollout) -> tuple[Any, ...]:
    """Return what identifies a prompt: its row and its tokens, without the name of the set."""
    return rollout.prompt.id.rpartition(":")[2], tuple(rollout.prompt.token_ids)
