"""Manifests: what a run depends on and what its first steps measured, in one file; and what differs here.

A manifest is trusted as a run file is: its config is run. Its fields are checked, and Python files that are absent here are
written only with the user's permission.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import platform
import subprocess
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from engine_core.config.dump import as_data, leaves
from engine_core.config.read import key_text
from engine_core.errors import ConfigError, DataError
from engine_core.redaction import REDACTED, Redactor
from engine_core.runs.checkpoint import MANIFEST, Checkpoints, problems
from engine_core.runs.rollout_files import read_rollouts
from engine_plugin_tools.replaying import NOT_OF_A_STEP, relative

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.runs.tracking import RunFolder
    from engine_core.types import Rollout

LARGEST = 16 * 2**20  # bytes of a file whose content is kept
LARGEST_MANIFEST = 256 * 2**20
SHOWN = 3  # changes that are shown of a code file


class StoredFile(BaseModel):
    """A file: its hash, and its content in base64 where the manifest keeps it."""

    model_config = ConfigDict(extra="forbid")
    sha256: str
    content: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is not None and hashlib.sha256(self.decoded()).hexdigest() != self.sha256:
            raise ValueError("the content does not have the hash: the manifest is damaged")
        return self

    def decoded(self) -> bytes:
        """Return the content; empty if the manifest does not keep it."""
        return base64.b64decode(self.content or "")


class Manifest(BaseModel):
    """What a run depends on, and what it measured.

    Attributes:
        run: name of the run.
        config: the resolved config as TOML, without secrets.
        environment: ``env.json`` of the attempt that trained the first step.
        hardware: processor, accelerators, threads.
        packages: versions of all installed distributions.
        source: ``git diff`` of the run's project, if it has changed files.
        inputs: files by key of the config and by name; a file that is named directly has the name "".
        steps: metrics by step, without those that depend on the machine.
        tokens: SHA-256 of the sampled tokens, by step, where rollouts were stored.
        weights: SHA-256 of the files with weights, by step of the checkpoint.
        band: largest relative difference of a metric between repeated runs; 0 for metrics that are not named.
    """

    model_config = ConfigDict(extra="forbid")
    format: Literal[1] = 1
    run: str
    config: str
    environment: dict[str, Any]
    hardware: dict[str, str]
    packages: dict[str, str]
    source: str | None = None
    inputs: dict[str, dict[str, StoredFile]]
    steps: dict[int, dict[str, float]]
    tokens: dict[int, str] = {}
    weights: dict[int, dict[str, str]]
    band: dict[str, float] = {}


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        DataError: the file cannot be read, is larger than 256 MiB, or is not a manifest.
    """
    try:
        if path.stat().st_size > LARGEST_MANIFEST:
            raise DataError(f"{path} has more than 256 MiB, so it is not a manifest.")
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"{path} is not a manifest: {where}: {first['msg']}. Write one: engine manifest RUN -o FILE."
        ) from error


def describe(folder: RunFolder, steps: int, data: bool, repeats: Sequence[RunFolder] = ()) -> Manifest:
    """Describe a run as the attempt that trained its first step.

    Args:
        folder: the run's folder.
        steps: number of first steps whose metrics are kept.
        data: whether to keep the content of data files too, not of code alone.
        repeats: runs of the same file, whose differences are the band of each metric.

    Raises:
        DataError: the run has not finished a step.
    """
    rows = [row for row in folder.read_metrics() if 0 < row["step"] <= steps]
    if not rows:
        raise DataError(f"{folder.path.name} has not finished a step, so there is nothing to reproduce.")
    attempt = attempt_of_first_step(folder)
    environment = json.loads((attempt / "env.json").read_text("utf-8"))
    text = (attempt / "config.resolved.toml").read_text("utf-8")
    checkpoints = Checkpoints(folder.checkpoints)
    good = {step: checkpoints.path(step) for step in checkpoints.steps()}
    recorded = {row["step"]: measured(row) for row in rows}
    return Manifest(
        run=folder.path.name,
        config=Redactor.of(tomllib.loads(text))(text),
        environment=environment,
        hardware=hardware(),
        packages=packages(),
        source=_source(environment),
        inputs={
            key: {name: _stored(file, key, data) for name, file in files.items()}
            for key, files in inputs_of(tomllib.loads(text)).items()
        },
        steps=recorded,
        tokens={
            step: hash_tokens(read_rollouts(file))
            for step in recorded
            if (file := folder.rollout_file(step)).is_file()
        },
        weights={step: hashes_of(path) for step, path in good.items() if not problems(path, deep=False)},
        band=_band(recorded, repeats),
    )


def _band(recorded: Mapping[int, Mapping[str, float]], repeats: Sequence[RunFolder]) -> dict[str, float]:
    """Return the largest relative difference of each metric between a run and its repeats."""
    band: dict[str, float] = {}
    for folder in repeats:
        for step, metrics in recorded.items():
            other = measured(folder.metrics_of(step))
            for name in metrics.keys() & other.keys():
                band[name] = max(band.get(name, 0.0), relative(metrics[name], other[name]))
    return {name: value for name, value in band.items() if value}


def attempt_of_first_step(folder: RunFolder) -> Path:
    """Return the log folder of the attempt that trained step 1: the newest that began before its metrics were written."""
    first = folder.metrics_of(1).get("time", float("inf"))
    found = [
        file.parent
        for file in folder.logs_dir.glob("attempt_*/env.json")
        if datetime.fromisoformat(json.loads(file.read_text("utf-8"))["started"]).timestamp() <= first
    ]
    return max(found, key=lambda path: int(path.name.removeprefix("attempt_")), default=folder.path)


def measured(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a step that do not depend on the machine, on timing or on evaluation."""
    left_out = (*NOT_OF_A_STEP, "async/", "eval/", "plugins/", "step")
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not name.startswith(left_out)
    }


def hashes_of(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file with weights of a checkpoint, from its manifest."""
    files = json.loads((checkpoint / MANIFEST).read_text("utf-8"))["files"]
    return {name: entry["sha256"] for name, entry in files.items() if _has_weights(name)}


def hash_tokens(rollouts: Iterable[Rollout]) -> str:
    """Return the SHA-256 of the tokens of rollouts, in whatever order."""
    parts = sorted((r.prompt.id, r.index, str(r.token_ids.tolist())) for r in rollouts)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hash_weights(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file with weights in a folder, by its path there."""
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: hash_file(file) for name, file in files.items() if _has_weights(name)}


def _has_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "optimizer" not in name


def inputs_of(data: Mapping[str, Any]) -> dict[str, dict[str, Path]]:
    """Return the existing files that a config names, by key and by name: code, data, models, tokenizers."""
    found: dict[str, dict[str, Path]] = {}
    for key, text in texts_of(data):
        path = file_of(text)
        if path.is_absolute() and path.is_file():
            found[key] = {"": path}
        elif path.is_absolute() and path.is_dir():
            inner = sorted(each for each in path.rglob("*") if each.is_file())
            found[key] = {str(each.relative_to(path)): each for each in inner}
    return found


def texts_of(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of each value of a config that may name an input; ``data.train[0]`` in lists."""
    for path, value in leaves(data):
        key = key_text(path)
        if path[0] in ("run", "tracking"):
            continue
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}[{at}]", each) for at, each in enumerate(value) if isinstance(each, str))


def file_of(text: str) -> Path:
    """Return the path in ``FILE`` or ``FILE.py:NAME``."""
    name, colon, _ = text.rpartition(".py:")
    return Path(f"{name}.py" if colon else text)


def _stored(file: Path, key: str, data: bool) -> StoredFile:
    keep = file.suffix == ".py" or (data and key.startswith(("data.", "eval.")))
    content = None
    if keep and file.stat().st_size <= LARGEST:
        content = base64.b64encode(file.read_bytes()).decode()
    return StoredFile(sha256=hash_file(file), content=content)


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hardware() -> dict[str, str]:
    """Return processor, accelerators and number of torch's threads of this machine."""
    import torch

    count = torch.accelerator.device_count()
    names = {torch.get_device_module().get_device_name(index) for index in range(count)} if count else set()
    return {
        "processor": _processor(),
        "accelerators": f"{count} x {', '.join(sorted(names))}" if count else "none",
        "threads": str(torch.get_num_threads()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def packages() -> dict[str, str]:
    """Return the version of each installed distribution."""
    return {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"]}


def _source(environment: Mapping[str, Any]) -> str | None:
    """Return the changes to the project of the working directory, if it is at the run's commit."""
    state = environment.get("git")
    if not state or not state["changed_files"]:
        return None
    asked = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        sha = subprocess.run(["git", "rev-parse", "HEAD"], **asked).stdout.strip()  # type: ignore[call-overload]
        found = subprocess.run(["git", "diff", "HEAD"], **asked).stdout  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return Redactor.of()(found) if sha == state["sha"] else None


def changed(manifest: Manifest, config: EngineConfig) -> list[tuple[str, str, str]]:
    """Return item, recorded value and value here of everything that is not as recorded."""
    from engine_core.runs.machine import describe_environment

    now = describe_environment(config)
    was = manifest.environment
    rows = [("python", str(was.get("python")), now["python"]), ("git", _git(was), _git(now))]
    rows += _items("hardware", manifest.hardware, hardware())
    rows += _items("package", manifest.packages | was.get("packages", {}), packages())
    rows += _items("environment", was.get("environment", {}), now["environment"])
    rows += _changed_inputs(manifest.inputs, inputs_of(as_data(config)))
    return [row for row in rows if row[1] != row[2]]


def _items(kind: str, was: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [(f"{kind} {name}", was.get(name, "-"), now.get(name, "-")) for name in sorted({*was, *now})]


def _git(environment: Mapping[str, Any]) -> str:
    state = environment.get("git")
    return f"{state['sha'][:12]}, {state['changed_files']} changed files" if state else "-"


def _changed_inputs(
    was: Mapping[str, Mapping[str, StoredFile]], now: Mapping[str, Mapping[str, Path]]
) -> Iterator[tuple[str, str, str]]:
    for key in was:
        here = now.get(key, {})
        for name in sorted({*was[key], *here}):
            item = f"{key} {name}".strip()
            if name not in was[key] or name not in here:
                yield item, *(("-", "exists") if name not in was[key] else ("exists", "-"))
                continue
            stored, file = was[key][name], here[name]
            if stored.sha256 != hash_file(file):
                yield from _difference(item, stored, file)


def _difference(item: str, stored: StoredFile, file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the first changed lines of a file whose content is known, else its hashes."""
    if stored.content is None:
        yield item, stored.sha256[:12], hash_file(file)[:12]
        return
    old, new = (
        data.decode("utf-8", "replace").splitlines() for data in (stored.decoded(), file.read_bytes())
    )
    spans = [
        op for op in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if op[0] != "equal"
    ]
    for _, from_old, to_old, from_new, to_new in spans[:SHOWN]:
        texts = ["\n".join(lines).strip() or "-" for lines in (old[from_old:to_old], new[from_new:to_new])]
        yield f"{item}, line {from_new + 1}", texts[0], texts[1]
    if not spans:
        yield item, stored.sha256[:12], "other line ends"


def settings_of(manifest: Manifest, folder: Path, given: Collection[str], allow_code: bool) -> dict[str, Any]:
    """Return the recorded config with files that are absent here written from the manifest.

    Args:
        manifest: the manifest.
        folder: folder to write absent files into, created where needed.
        given: keys that the user sets, which need no file and no secret.
        allow_code: whether Python files may be written, which the run then executes.

    Raises:
        ConfigError: Python files without ``allow_code``; a secret that was left out.
        DataError: the manifest does not hold an absent file.
    """
    data = tomllib.loads(manifest.config)
    written: dict[str, str] = {}
    for key, text in texts_of(data):
        if key.partition("[")[0] in given:
            continue
        if REDACTED in text:
            raise ConfigError(f"{key}: the manifest leaves out this secret. Use --set {key}=VALUE.")
        path = file_of(text)
        if key not in manifest.inputs or path.exists():
            continue
        stored = manifest.inputs[key].get("")
        if stored is None or stored.content is None:
            raise DataError(
                f"{key}: there is no '{path}' here, and the manifest does not hold it. Use --set {key}=PATH."
            )
        if path.suffix == ".py" and not allow_code:
            raise ConfigError(
                f"{key}: there is no '{path}' here. The manifest holds it; --allow-code writes it and runs it."
            )
        target = folder.resolve() / str(len(written)) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(stored.decoded())
        written[text] = text.replace(str(path), str(target), 1)
    return _replaced(data, written)


def _replaced(node: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _replaced(value, texts) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, texts) for value in node]
    return texts.get(node, node) if isinstance(node, str) else node
