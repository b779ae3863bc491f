"""The model card of an exported model: ``README.md`` with the metadata of the hub, and ``curves.png``.

The card is made from the files of the run folder and of the exported folder. What they lack is left out. A card is
published, so it shows no secret, no path and no address of a machine: only names of files, folders and programs.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import logging
import re
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load

from engine_core.config.assemble import plugins_for
from engine_core.data.layouts import with_system
from engine_core.redaction import Redactor
from engine_core.runs.logs import clock
from engine_plugin_tools.card_prompts import QUESTION, uses_template
from engine_plugin_tools.card_scores import data_name, eval_results, hub_dataset, newest_scores, samplings
from engine_plugin_tools.curves import draw_curves
from engine_plugin_tools.hub import CARD

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.runs.tracking import RunFolder

log = logging.getLogger("engine")

CURVES = "curves.png"
TRAINING = "\n## Training\n"
LICENSE = ("license", "license_name", "license_link")
CLASSES = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}
"""The end of a class's name -> task on the hub."""
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_PATH = re.compile(r"(?<![\w.:/<~])(?:/[^\s/'\":,;|\\]+)+/[^\s/'\":,;|\\]+/?")
_ADDRESS = re.compile(
    r"""
    [a-z][\w+.-]*://[^\s'"\\]*                                              # any URL
    | \[[\da-f]*(?::[\da-f.]*){2,}\](?::\d+)?                               # [::1]:80
    | (?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![.-]?\w)                # 10.1.2.3, 10.1.2.3:80
    | (?<![\w./-])[a-z][\w-]*(?:\.[\w-]+)+:\d{2,5}(?!\w)                   # head.example.com:80
    | (?<![\w./-])(?:[\w-]+\.)+(?:corp|internal|intranet|lan|local)(?![.-]?\w)
    | (?:^|(?<=,))[a-z][\w-]*:\d{2,5}(?=,|$)                                # head:80, as a whole string or in a list
    """,
    re.IGNORECASE | re.VERBOSE,
)


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
    sources = {source["name"]: source for source in environment.get("data_sources") or []}
    learned = [sources[name] for name in _source_names(config) if name in sources]
    base, task, algorithm = _base(config, role), _task(folder, adapter), _algorithm(config)
    evaluated, scores = newest_scores(config, lines) if role == "actor" else (None, [])
    shown: dict[str, Any] = {
        "name": name or (folder.name if folder.is_absolute() else str(folder)),
        "summary": _summary(config, step, adapter, role, base, algorithm, _data(config, sources)),
        "base": base,
        "task": task,
        "adapter": adapter,
        "chat": (folder / "chat_template.jinja").is_file() and uses_template(run, config),
        "messages": public(json.dumps(with_system([QUESTION], config.data.system), ensure_ascii=False)),
        "template_options": config.data.chat_template_kwargs,
        "question": QUESTION["content"],
        "most_tokens": config.rollout.max_response_tokens,
        "licensed": [source for source in learned if source["license"]],
        "step": step,
        "evaluated": evaluated,
        "scores": scores,
        "samplings": samplings(config, scores, sources),
        "curves": _draw(folder, lines),
        "facts": _facts(config, environment, lines, step, run.path.name),
        "run_file": public(run.config_file.read_text("utf-8")),
    }
    metadata = ModelCardData(
        **(base.license if base else {}),
        base_model=base.id if base else None,
        base_model_relation=("adapter" if adapter else "finetune") if base and base.id else None,
        datasets=[dataset for source in learned if (dataset := hub_dataset(source))] or None,
        library_name="peft" if adapter else "transformers" if (folder / "config.json").is_file() else None,
        pipeline_tag=task,
        tags=["engine", config.trainer, *algorithm, *(["lora"] if adapter else [])],
        model_name=shown["name"],
        # Results of an earlier step are those of other weights.
        eval_results=eval_results(scores, sources) or None if evaluated == step else None,
    )
    redact = Redactor.of(tomllib.loads(run.config_file.read_text("utf-8")))
    text = f"---\n{metadata.to_yaml()}\n---\n\n{_body(shown)}"
    (folder / CARD).write_text(redact(text), encoding="utf-8")
    _say_missing_license(base)
    return folder / CARD


def _say_missing_license(base: Base | None) -> None:
    """Print that the license of a base model is not known, if so."""
    if base is not None and not base.license:
        missing = f"no license of {base.id or base.name} is known"
        print(f"engine: {missing}: add 'license: NAME' to the metadata of {CARD}.", file=sys.stderr)


def _body(shown: Mapping[str, Any]) -> str:
    """Return the text of a card; a variable that the template lacks is an error."""
    template = resources.files("engine_plugin_tools").joinpath("model_card_template.md").read_text("utf-8")
    page = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    page.filters |= {"number": "{:.4g}".format, "repr": repr}
    return page.from_string(template).render(shown)


def rename_card(folder: Path, name: str) -> None:
    """Change the name in the title, the examples and the metadata of a card that ``write_card`` wrote."""
    if not _metadata(folder / CARD):
        return
    card = ModelCard.load(folder / CARD)
    if old := card.data.model_name:
        card.data.model_name = name
        usage, heading, training = card.text.partition(TRAINING)  # whose run file may hold the same string
        usage = usage.replace(f"\n# {old}\n", f"\n# {name}\n").replace(f'"{old}"', f'"{name}"')
        card.text = usage + heading + training
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

    In strings, an absolute path is replaced by its last part, a home folder by ``home``, and the address of a machine by
    ``[private address]``. ``https`` URLs of public hosts and ``hf`` URLs stay.
    """

    def shown(match: re.Match[str]) -> str:
        """Return a TOML string to publish."""
        value = json.loads(match[0], strict=False)
        if value.startswith("/") and value.count("/") > 1 and "\n" not in value:
            found = _last_part(value)  # a whole path, which may contain spaces
        else:
            found = _PATH.sub(lambda path: _last_part(path[0]), _ADDRESS.sub(_address, value))
        return match[0] if found == value else json.dumps(found, ensure_ascii=False)

    return _STRING.sub(shown, text)


def _last_part(path: str) -> str:
    """Return the last part of an absolute path; ``home`` for the home folder of a user."""
    above, _, name = path.rstrip("/").rpartition("/")
    return "home" if above.rpartition("/")[2].lower() in ("home", "users") else name


def _address(match: re.Match[str]) -> str:
    """Return an address to publish: a URL of a public host, else ``[private address]``."""
    url = urlsplit(match[0])
    public_host = url.scheme == "https" and "@" not in url.netloc and not _ADDRESS.search(url.netloc)
    shown = url.scheme == "hf" or (public_host and "." in url.netloc)
    return match[0] if shown else "[private address]"


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def fetch_base_card(config: EngineConfig, role: str) -> None:
    """Download the card of a role's base model from the hub, so that ``write_card`` finds its license.

    Loading a model does not download its card. A failure is logged; ``write_card`` then says that the license is unknown.
    """
    path = _base_path(config, role)
    if not path or _is_local(path):
        return
    try:
        hf_hub_download(path, CARD)
    except (OSError, ValueError, httpx.HTTPError) as error:
        log.info("The card of %s cannot be downloaded: %s", path, error)


def _base_path(config: EngineConfig, role: str) -> str:
    return config.role(role).path or config.model.path


def _is_local(path: str) -> bool:
    return Path(path).is_absolute() or Path(path).is_dir()


def _base(config: EngineConfig, role: str) -> Base | None:
    """Return the model that a role started from; None if the run file names none.

    The id of a folder is the base model that the folder's card names.
    """
    path = _base_path(config, role)
    if not path:
        return None
    local = _is_local(path)
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


def _source_names(config: EngineConfig) -> list[str]:
    """Return the names of the data sources of the training data."""
    return list(dict.fromkeys(part.source for part in config.data.parts if part.source))


def _data(config: EngineConfig, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the training data in a few words; empty if the run file names none."""
    parts = (data_name(part.path, part.source, sources) for part in config.data.parts)
    return ", ".join(dict.fromkeys(filter(None, parts)))


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
