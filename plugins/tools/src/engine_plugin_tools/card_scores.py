"""The results on a model card: the newest evaluation of a run as table rows, sentences and hub metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.config.evaluation import UNNAMED, held_out_sets
from engine_core.tables import DEFAULTS, DISTRIBUTION

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from engine_core.config import EngineConfig
    from engine_core.config.evaluation import HeldOut

NOT_SCORES = ("prompts", "unscored", "response_length", "truncated_share")
HUB_DATASET = re.compile(r"https://(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)/?")


@dataclass(frozen=True)
class Score:
    """One metric of one held-out set, with its 95% interval.

    Args:
        held_out: the set.
        label: name of the set.
        metric: name of the metric without that of the set.
        value: its value.
        low, high: bounds of the interval; None: it has none.
        before: its value before the first step; None: not measured.
        prompts: number of evaluated prompts; None: the trainer does not count them.
    """

    held_out: HeldOut
    label: str
    metric: str
    value: float
    low: float | None
    high: float | None
    before: float | None
    prompts: int | None


def newest_scores(config: EngineConfig, lines: Sequence[Mapping[str, Any]]) -> tuple[int | None, list[Score]]:
    """Return the step and the scores of the newest evaluation; (None, []) if there was none."""
    measured = [line for line in lines if any(name.startswith("eval/") for name in line)]
    if not measured:
        return None, []
    last = measured[-1]
    first = measured[0] if measured[0]["step"] == 0 < last["step"] else {}
    scores = []
    for held_out in held_out_sets(config):
        own = {
            name.removeprefix(held_out.prefix): value
            for name, value in last.items()
            if name.startswith(held_out.prefix) and "/" not in name.removeprefix(held_out.prefix)
        }
        prompts = own.get("prompts")
        bounds = {f"{name}_{end}" for name in own for end in ("low", "high")}
        scores += [
            Score(
                held_out=held_out,
                label=held_out.name or UNNAMED,
                metric=name,
                value=value,
                low=own.get(f"{name}_low"),
                high=own.get(f"{name}_high"),
                before=first.get(held_out.prefix + name),
                prompts=None if prompts is None else int(prompts),
            )
            for name, value in own.items()
            if value is not None and name not in bounds | set(NOT_SCORES)
        ]
    return last["step"], sorted(scores, key=lambda score: score.low is None)  # with an interval first; stable


def eval_results(scores: Sequence[Score], sources: Mapping[str, Mapping[str, Any]]) -> list[EvalResult]:
    """Return the scores for the card's ``model-index``, each with the data set that its own set names.

    Args:
        scores: of one evaluation.
        sources: the data sources of ``env.json`` by name.
    """
    from huggingface_hub import EvalResult

    found = []
    for score in scores:
        files = file_names(score.held_out.path)
        source = {} if files else sources.get(score.held_out.source, {})
        dataset = hub_dataset(source)
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=dataset or score.label,
                dataset_name=files or source.get("name") or score.label,
                dataset_revision=dataset and (source.get("revision") or None),
                metric_type=score.metric,
                metric_name=score.metric,
                metric_value=score.value,
            )
        )
    return found


def samplings(
    config: EngineConfig, scores: Sequence[Score], sources: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return a sentence for each evaluated set: its files or data source, prompts and sampling."""
    sentences = []
    every_reward = [reward.name for reward in config.reward]
    for score in {score.label: score for score in scores}.values():
        held_out = score.held_out
        settings = [
            f"{name} {getattr(held_out, name):g}"
            for name in DISTRIBUTION
            if name == "temperature" or getattr(held_out, name) != DEFAULTS[name]
        ]
        parts = [data_name(held_out.path, held_out.source, sources)]
        if score.prompts is not None:
            each = held_out.samples_per_prompt
            parts += [
                f"{score.prompts} prompts",
                f"{each} response{'s' if each > 1 else ''} each",
                "greedy" if held_out.temperature == 0 else ", ".join(settings),
                f"at most {held_out.max_response_tokens} tokens",
            ]
            scorer = held_out.score or next(iter(held_out.rewards or every_reward), "")
            parts += [f"scored by `{scorer}`"] if scorer else []
        sentences.append(f"`{score.label}`: {', '.join(parts)}")
    return sentences


def file_names(paths: str | Sequence[str]) -> str:
    """Return the names of files without their folders, separated by commas."""
    return ", ".join(Path(path).name for path in ([paths] if isinstance(paths, str) else paths) if path)


def data_name(paths: str | Sequence[str], name: str, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the names of files, or the name of a data source with its link; empty if there is neither."""
    if files := file_names(paths):
        return f"`{files}`"
    url = sources.get(name, {}).get("url")
    return f"[{name}]({url})" if url else f"`{name}`" if name else ""


def hub_dataset(source: Mapping[str, Any]) -> str | None:
    """Return the name of a data source's set on the hub; None if its URL is another one."""
    found = HUB_DATASET.fullmatch(source.get("url") or "")
    return found[1] if found else None
