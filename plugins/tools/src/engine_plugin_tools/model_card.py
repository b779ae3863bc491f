"""The model card of an exported model: ``README.md`` with the metadata of the hub, and ``curves.png``.

The card is made from the files of the run folder and of the exported folder. What they lack is left out. A card is
published, so it shows no secret, no path and no address of a machine: only names of files, folders and programs.
"""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
import json
import logging
import re
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load

from engine_core.config.assemble import plugins_for
from engine_core.redaction import Redactor
from engine_core.runs.logs import clock
from engine_plugin_tools.card_scores import eval_results, file_names, hub_dataset, newest_scores, samplings
from engine_plugin_tools.report import draw_curves

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.runs.tracking import RunFolder

log = logging.getLogger("engine")

CARD, CURVES = "README.md", "curves.png"
LICENSE = ("license", "license_name", "license_link")
CLASSES = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}
"""The end of a class's name -> task on the hub."""
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_PATH = re.compile(r"(?<![\w.:/<~])(?:/[^\s/'\":,;|\\]+)+/([^\s/'\":,;|\\]+)")
_URL = re.compile(r"https?://[^\s'\"\\]+")


@dataclass(frozen=True)
class Base:
    """The model that the run started from.

    Args:
        name: name on the hub, or the name of a folder.
        id: name on the hub; None: it is not known.
        license: license fields of its card; empty if the card is not on this machine.
    """

    name: str
    id: str | None
    license: Mapping[str, Any]


def write_card(
    folder: Path,
    run: RunFolder,
    config: EngineConfig,
    step: int,
    adapter: bool = False,
    role: str = "actor",
    name: str | None = None,
) -> Path:
    """Write ``README.md``, and ``curves.png`` if matplotlib is installed, into an exported folder; return the card.

    Args:
        folder: the exported model or adapter.
        run: its run.
        config: config of the run.
        step: step of the exported checkpoint; later metrics are left out.
        adapter: whether ``folder`` holds a LoRA adapter alone.
        role: the exported role.
        name: name in the card's title and examples, such as ``user/model``; default: the folder.
    """
    lines = [line for line in run.read_metrics() if line["step"] <= step]
    environment = _read_json(run.path / "env.json")
    source = environment.get("data_source") or {}
    base, task, algorithm = _base(config, role), _task(folder, adapter), _algorithm(config)
    evaluated, scores = newest_scores(config, lines) if role == "actor" else (None, [])
    shown = {
        "name": name or (folder.name if folder.is_absolute() else str(folder)),
        "summary": _summary(config, step, adapter, role, base, algorithm, _data(config, source)),
        "base": base,
        "task": task,
        "adapter": adapter,
        "chat": config.data.chat_template is not False and (folder / "chat_template.jinja").is_file(),
        "most_tokens": config.rollout.max_response_tokens,
        "source": source,
        "step": step,
        "evaluated": evaluated,
        "scores": scores,
        "samplings": samplings(config, scores),
        "curves": _draw(folder, lines),
        "facts": _facts(config, environment, lines, step, run.path.name),
        "run_file": public(run.config_file.read_text("utf-8")),
    }
    metadata = ModelCardData(
        **(base.license if base else {}),
        base_model=base.id if base else None,
        base_model_relation=("adapter" if adapter else "finetune") if base and base.id else None,
        datasets=[dataset] if (dataset := hub_dataset(source)) else None,
        library_name="peft" if adapter else "transformers" if (folder / "config.json").is_file() else None,
        pipeline_tag=task,
        tags=["engine", config.trainer, *algorithm, *(["lora"] if adapter else [])],
        model_name=shown["name"],
        # Results of an earlier step are those of other weights.
        eval_results=eval_results(scores, source) or None if evaluated == step else None,
    )
    redact = Redactor.of(tomllib.loads(run.config_file.read_text("utf-8")))
    text = f"---\n{metadata.to_yaml()}\n---\n\n{_body(shown)}"
    (folder / CARD).write_text(redact(text), encoding="utf-8")
    return folder / CARD


def _body(shown: Mapping[str, Any]) -> str:
    """Return the text of a card; a variable that the template lacks is an error."""
    template = resources.files("engine_plugin_tools").joinpath("model_card_template.md").read_text("utf-8")
    page = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    page.filters["number"] = "{:.4g}".format
    return page.from_string(template).render(shown)


def rename_card(folder: Path, name: str) -> None:
    """Change the name in the title, the examples and the metadata of a card that ``write_card`` wrote."""
    if not _metadata(folder / CARD):
        return
    card = ModelCard.load(folder / CARD)
    if old := card.data.model_name:
        card.data.model_name = name
        card.text = card.text.replace(f"\n# {old}\n", f"\n# {name}\n").replace(f'"{old}"', f'"{name}"')
        card.save(folder / CARD)


def _metadata(file: Path) -> dict[str, Any]:
    """Return the metadata of a card; {} if the file does not exist, or has none that can be read."""
    try:
        return (metadata_load(file) if file.is_file() else None) or {}
    except (ValueError, yaml.YAMLError) as error:
        log.warning("The metadata of %s cannot be read, and are left out: %s", file, error)
        return {}


def public(text: str) -> str:
    """Return the text of a TOML file without what describes a machine, for publication.

    In strings, an absolute path is replaced by its last part, and a URL whose host is an IP address or has no domain by
    ``[private address]``.
    """

    def shown(match: re.Match[str]) -> str:
        """Return a TOML string to publish."""
        value = match[1]
        if value.startswith("/") and value.count("/") > 1 and "\\n" not in value:
            return f'"{value.rstrip("/").rpartition("/")[2]}"'  # a whole path, which may contain spaces
        value = _URL.sub(lambda url: "[private address]" if _is_private(url[0]) else url[0], value)
        return f'"{_PATH.sub(lambda path: path[1], value)}"'

    return _STRING.sub(shown, text)


def _is_private(url: str) -> bool:
    """Return whether the host of a URL is an IP address or a name without a public domain."""
    host = urlsplit(url).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal", ".lan"))
    return True


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def _base(config: EngineConfig, role: str) -> Base | None:
    """Return the model that a role started from; None if the run file names none.

    The id of a folder is the base model that the folder's card names.
    """
    path = config.role(role).path or config.model.path
    if not path:
        return None
    local = Path(path).is_absolute() or Path(path).is_dir()
    found = Path(path) / CARD if local else try_to_load_from_cache(path, CARD)
    card = _metadata(Path(found)) if isinstance(found, str | Path) else {}
    above = card.get("base_model")
    id = (above if isinstance(above, str) else None) if local else path
    license = {key: card[key] for key in LICENSE if key in card}
    return Base(Path(path).name if local else path, id, license)


def _task(folder: Path, adapter: bool) -> str | None:
    """Return the task of the exported model's class on the hub; None for another class."""
    if adapter:
        kind = str(_read_json(folder / "adapter_config.json").get("task_type"))
        return {"CAUSAL_LM": "text-generation", "SEQ_CLS": "text-classification"}.get(kind)
    names = _read_json(folder / "config.json").get("architectures") or [""]
    return next((task for end, task in CLASSES.items() if names[0].endswith(end)), None)


def _algorithm(config: EngineConfig) -> list[str]:
    """Return the names of the advantage and the loss, or of the trainer's own loss."""
    sections = getattr(plugins_for(config).spec("trainers", config.trainer), "sections", ())
    if not sections or "algorithm" in sections:
        return [config.algorithm.advantage, config.algorithm.loss]
    loss = getattr(config.options, "loss", None)
    return [loss] if isinstance(loss, str) else []


def _summary(
    config: EngineConfig,
    step: int,
    adapter: bool,
    role: str,
    base: Base | None,
    algorithm: Sequence[str],
    data: str,
) -> str:
    """Return what the model is and how it was trained, in one sentence."""
    kind = "reward model" if config.trainer == "reward_model" else "language model"
    what = "A LoRA adapter" if adapter else f"A {kind}" if role == "actor" else f"The {role} of a run"
    start = f" {'for' if adapter else 'trained from'} {_linked(base)}" if base is not None else ""
    verb = ", trained" if adapter or not start else ""
    named = f" ({', '.join(f'`{name}`' for name in algorithm)})" if algorithm else ""
    rewards = [f"`{reward.name}`" for reward in config.reward if reward.weight]
    reward = f", reward{'s' if len(rewards) > 1 else ''} {', '.join(rewards)}" if rewards else ""
    return (
        f"{what}{start}{verb}{f' on {data}' if data else ''} with Engine: "
        f"{step} step{'' if step == 1 else 's'} of the trainer `{config.trainer}`{named}{reward}."
    )


def _linked(base: Base) -> str:
    """Return the base model's name, with links to what is on the hub."""
    link = f"[{base.id}](https://huggingface.co/{base.id})"
    if base.id == base.name:
        return link
    return f"`{base.name}` (from {link})" if base.id else f"`{base.name}`"


def _data(config: EngineConfig, source: Mapping[str, Any]) -> str:
    """Return the training data in a few words; empty if the run file names none."""
    if files := file_names(config.data.train):
        return f"`{files}`"
    if not source:
        return ""
    return f"[{source['name']}]({source['url']})" if source.get("url") else f"`{source['name']}`"


def _draw(folder: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    """Draw the learning curves into the folder; return the picture's name, or "" without matplotlib or steps."""
    if importlib.util.find_spec("matplotlib") is None or not lines:
        return ""
    draw_curves(lines).savefig(folder / CURVES, dpi=100)
    return CURVES


def _facts(
    config: EngineConfig,
    environment: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    step: int,
    run_name: str,
) -> list[tuple[str, str]]:
    """Return (label, value) of the training, in the order of the card."""
    steps = [line for line in lines if line["step"] > 0]
    seconds = sum(line.get("time/step") or 0.0 for line in steps)
    rewards = [line["reward/mean"] for line in steps if line.get("reward/mean") is not None]
    tenth = max(1, len(rewards) // 10)
    lora = config.actor.lora
    seeds = environment.get("seeds") or {}
    packages = {**environment.get("packages", {}), **environment.get("plugins", {})}
    facts = {
        "run": run_name,
        "date": _date(lines[-1].get("time")) if lines else "",
        "steps": str(step),
        "LoRA": lora and f"rank {lora.rank}, alpha {lora.alpha:g}",
        "mean reward, last tenth of the steps": rewards and f"{statistics.fmean(rewards[-tenth:]):.3f}",
        "seeds": ", ".join(f"{name} {value}" for name, value in seeds.items()),
        "time in steps": seconds and clock(seconds),
        "tokens in updates": _total(steps, "tokens/total"),
        "tokens sampled": _total(steps, "tokens/generated"),
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "Python": environment.get("python"),
    }
    return [(label, str(value)) for label, value in facts.items() if value]


def _date(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d}"


def _total(lines: Sequence[Mapping[str, Any]], name: str) -> str:
    total = sum(line.get(name) or 0 for line in lines)
    return f"{total:,.0f}" if total else ""
