"""``engine eval``: score a model on held-out rows, those of a run file or those of a suite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core import load_config
from engine_core.cli.loading import chosen_checkpoint, load_trainer, read, read_run
from engine_core.cli.options import AllowCode, Json, Sets, Step
from engine_core.cli.output import check_new, print_json, print_table
from engine_core.config.evaluation import held_out_sets
from engine_core.config.read import key_text, read_config
from engine_core.data import load_tokenizer
from engine_core.data.tokenizer import end_tokens
from engine_core.errors import ConfigError
from engine_core.runs.logs import half_width, with_interval
from engine_core.runs.tracking import RunFolder
from engine_plugin_tools.suites import SUITES, Suite, chosen_suites, described, run_settings

if TYPE_CHECKING:
    from engine_core.config import EngineConfig

PROTOCOL_TABLES = ("data.", "eval.", "reward.")
"""Tables of a run file that define what a suite measures; their keys in ``--set`` are changes of the suite."""


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RUN|MODEL",
            help="Run file; a run: its newest checkpoint; with --suite also a model folder or hub name.",
        ),
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            metavar="NAME",
            help=f"Measure a public set by a published protocol: {', '.join(SUITES)}; may be repeated.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", metavar="FOLDER", help="Read the suite's set from a folder, not from the hub."
        ),
    ] = None,
    step: Step = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Write what was sampled there, one file a set: for 'engine compare'.",
        ),
    ] = None,
    sets: Sets = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Score a model on the held-out rows of [eval]: 'data.validation' and each [[eval.set]]; or on suites.

    A suite replaces the rows, the rewards and the [eval] table of the run file, so that its score can be compared with
    published ones. Of a model folder only the sampler is loaded. --step with a run file, or --out with a trainer that
    samples nothing, raises an error.

    Example: engine eval latest --json --out scores
    """
    suites = chosen_suites(suite) if suite is not None else {}
    if out is not None:
        check_new(out)
    if source is not None and not suites:
        raise ConfigError("--source: names the rows of a suite. Add --suite NAME, or remove it.")
    files, folder = locate(target, bool(suites))
    if folder is None and step is not None:
        raise ConfigError(f"--step: '{target}' is no run, and only a run has checkpoints. Name a run folder.")
    if suites:
        model = {} if files else {"model.path": target}
        settings = model | run_settings(suites, source)
        config = for_suites(files, settings, suites, sets or (), allow_code or folder is not None)
    else:
        config = read(files, sets, allow_code=allow_code) if folder is None else read_run(folder, sets)
    checkpoint = chosen_checkpoint(folder, step, config) if folder is not None else None
    metrics = measure(config, checkpoint, out)
    found = {name: result(name, each, metrics, config, sets or ()) for name, each in suites.items()}
    if found and out is not None:
        (out / "suites.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if not found:
        print_metrics(metrics, as_json)
    elif as_json:
        print_json(found)
    else:
        print("\n\n".join(block(name, each) for name, each in found.items()))


def measure(config: EngineConfig, checkpoint: Path | None, out: Path | None) -> dict[str, float]:
    """Return the metrics of the held-out sets, with the weights of a checkpoint if there is one.

    Raises:
        ConfigError: ``out`` names where to write what is sampled, and the trainer samples nothing.
    """
    with closing(load_trainer(config)) as trainer:
        if out is not None and not hasattr(trainer, "generate"):
            raise ConfigError(
                f"--out: trainer = '{config.trainer}' samples nothing, so there is nothing to write. Export the model, then: "
                "engine eval RL.toml --set model.path=EXPORT --out DIR"
            )
        if checkpoint is not None:
            trainer.load_checkpoint(checkpoint)
        metrics: dict[str, float] = trainer.evaluate(out) if out is not None else trainer.evaluate()
        return metrics


def locate(target: str, model: bool) -> tuple[list[str], RunFolder | None]:
    """Return the run files of a target, and its run folder; neither for a model folder or a hub name.

    Args:
        target: the argument of the command.
        model: whether the target may be a model.

    Raises:
        ConfigError: it is a model folder and may not be.
        DataError: there is nothing of this name.
    """
    path = Path(target)
    if target.endswith(".toml") or path.is_file():
        return [target], None
    is_folder = (path / "config.json").is_file()
    if is_folder and not model:
        raise ConfigError(
            f"'{target}' is a model: name what to measure, --suite NAME ({', '.join(SUITES)}), or a run file "
            f"with [eval]: engine eval run.toml --set model.path={target}"
        )
    is_hub_name = target.count("/") == 1 and not path.exists() and not path.parent.is_dir()
    if is_folder or (model and is_hub_name):
        return [], None
    folder = RunFolder.open(target)
    return [str(folder.config_file)], folder


def for_suites(
    files: Sequence[str],
    settings: Mapping[str, Any],
    suites: Mapping[str, Suite],
    sets: Sequence[str],
    allow_code: bool,
) -> EngineConfig:
    """Return the config that measures suites.

    A tokenizer without a chat template gets plain text, as base models do, unless ``sets`` asks for the template.
    `rollout.stop_token_ids` gets the model's end tokens, unless the run file or ``sets`` has ids.

    Args:
        files: run files; empty for a model alone.
        settings: over those of the files; see ``run_settings``.
        suites: by name.
        sets: ``--set``, over the settings.
        allow_code: accept plugin files outside the folder of the run file.
    """
    unset = no_length_limit(files, allow_code)
    config = load_config(*files, unset, settings, overrides=list(sets), allow_code=allow_code)
    config.environment = None  # a suite asks for one response, whatever the run learns from
    chosen = any("chat_template=" in entry for entry in sets)
    if not load_tokenizer(config.model).chat_template and not chosen:
        for held_out in config.eval.set:
            held_out.chat_template = False
    if not config.rollout.stop_token_ids:
        ends = {"stop_token_ids": end_tokens(config.model)}
        config.rollout = config.rollout.model_copy(update=ends)
    return config


def no_length_limit(files: Sequence[str], allow_code: bool) -> dict[str, None]:
    """Return settings that unset `max_model_len` of each sampler in run files: it fits the run's rows, not a suite's.

    Args:
        files: run files.
        allow_code: accept extended files outside the folder of the run file.
    """
    rollout = read_config(files, allow_code=allow_code).data.get("rollout")
    tables = rollout.items() if isinstance(rollout, dict) else ()
    held = [name for name, table in tables if isinstance(table, dict) and "max_model_len" in table]
    return {key_text(("rollout", name, "max_model_len")): None for name in held}


def result(
    name: str, suite: Suite, metrics: Mapping[str, float], config: EngineConfig, sets: Sequence[str]
) -> dict[str, Any]:
    """Return what a suite gave, and what its score can be compared with.

    Args:
        name: of the suite.
        suite: its protocol.
        metrics: of the evaluation.
        config: as it was measured.
        sets: ``--set`` of the command, of which some change the protocol.
    """
    prefix = f"eval/{name}/"
    measured = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    (table,) = (each for each in held_out_sets(config) if each.name == name)
    not_here = [f"eval.set.{each.name}." for each in config.eval.set if each.name != name]
    not_here += [] if table.chat_template else ["data.system", "data.chat_template_kwargs"]
    changed = [
        entry for entry in sets if entry.startswith(PROTOCOL_TABLES) and not entry.startswith(tuple(not_here))
    ]
    if suite.chat and not table.chat_template and not any("chat_template=" in entry for entry in sets):
        changed.append("the tokenizer has no chat template: plain text")
    of_run = config.data.chat_template_kwargs if table.chat_template else {}
    if of_run and not any("chat_template_kwargs" in entry for entry in changed):
        changed.append(f"arguments of the chat template: {json.dumps(of_run)}")
    protocol = {
        "measured": described(table),
        "reads": dict(suite.rewards),
        "follows": suite.follows,
        "url": suite.url,
        "differs": list(suite.differs),
        "changed": changed,
    }
    return {"protocol": protocol, **measured}


def block(name: str, found: Mapping[str, Any]) -> str:
    """Return the result of a suite as lines of text."""
    protocol = found["protocol"]
    first, *others = protocol["reads"]
    interval = (
        f"[{found['accuracy_low']:.3f}, {found['accuracy_high']:.3f}]" if "accuracy_low" in found else ""
    )
    rows = [("accuracy", f"{found['accuracy']:.3f}  {interval}  {protocol['reads'][first]}")]
    rows += [(other, f"{found[other]:.3f}  {protocol['reads'][other]}") for other in others]
    rows += [
        ("length", f"{found['response_length']:.0f} tokens, {found['truncated_share']:.1%} cut at the limit"),
        ("time", f"{found['seconds']:.0f} s"),
        ("follows", f"{protocol['follows']} ({protocol['url']})"),
        *(("differs", text) for text in protocol["differs"]),
        *(("changed", text) for text in protocol["changed"]),
    ]
    if found["unscored"]:
        rows.insert(1, ("unscored", f"{found['unscored']:.0f} responses without a score, left out"))
    head = f"{name}: {found['prompts']:.0f} prompts, {protocol['measured']}"
    width = max(len(key) for key, _ in rows)
    return "\n".join([head, *(f"  {key.ljust(width)}  {text}" for key, text in rows)])


def print_metrics(metrics: Mapping[str, float], as_json: bool) -> None:
    """Print metrics by name. One with a 95% interval is shown as ``0.83 ± 0.04``, in JSON with its bounds."""
    if as_json:
        print_json(dict(metrics))
        return
    measured = [name for name in metrics if half_width(metrics, name) is not None]
    bounds = {f"{name}_{end}" for name in measured for end in ("low", "high")}
    print_table([(name, with_interval(metrics, name)) for name in sorted(metrics) if name not in bounds])
