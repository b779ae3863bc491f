"""A rollout plugin of another Python environment: its capabilities and the validation of its options.

With ``[rollout.process] python`` the plugin need not be importable here. Its interpreter runs for about a second: it
loads the plugin, returns what the plugin offers, and validates its option table. Errors of the table are reported like
any other problem of the run file, with file and line.

    here: ``foreign_plugin`` makes a ``RolloutBackend`` whose option model validates there; ``ask`` runs the interpreter
    there: ``python -m engine_plugin_processes.foreign_interpreter``, one JSON object in, one line of JSON out
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, PrivateAttr, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

import engine_core
import engine_plugin_processes
from engine_core.errors import EngineError, PluginError
from engine_core.plugins.plugin_set import Plugin, PluginProblems, PluginSet
from engine_core.specs import Options, RolloutBackend, resolve

ASK_SECONDS = 300.0  # the plugin may import a large library
ENGINE = "engine_plugin_processes.sampler_process.engine:SamplerEngine"
PACKAGES = {"engine_core": "engine-core-rl", "engine_plugin_processes": "engine-plugin-processes"}
"""What the other environment imports before the rollout plugin, and the distributions of ``versions`` that bring it."""
MODEL_HOOKS = ("engine_build_model", "engine_register_model")
"""Hooks of the run's plugins that are called where the sampler is."""
OUT_OF_REACH = frozenset({"share_module"})
"""Capabilities that need one process with the trainer."""
OF_AN_INTERPRETER = ("PYTHONHOME", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV")
"""Variables by which an interpreter would find the libraries of another."""


def load_backend(
    name: str,
    modules: Sequence[str],
    root: Path,
    allow_code: bool,
    other: bool,
    actor: str = "",
    tables: Mapping[str, Any] | None = None,
) -> PluginSet:
    """Return the plugin of a rollout engine, and those of the run's plugins that load in this environment.

    Args:
        name: name of the rollout engine.
        modules: the run file's ``plugins = [...]``.
        root: the run file's folder.
        allow_code: whether files outside ``root`` may be run.
        other: whether this is not the trainer's environment: plugins of the run that the engine does not need may be
            missing.
        actor: train engine whose plugin also builds the sampler's model; "" if none does.
        tables: ``[plugin]`` of the run file.

    Raises:
        PluginProblems: the engine cannot be loaded, or a required plugin of the run cannot.
    """
    try:
        names = {"rollout_engines": {name}, **({"train_engines": {actor}} if actor else {})}
        return PluginSet.load(names, modules, root, allow_code, tables)
    except PluginProblems as error:
        if not other or error.loaded.find("rollout_engines", name) is None:
            raise
        return error.loaded


# -- here ---------------------------------------------------------------


def foreign_plugin(python: str, name: str, plugins: PluginSet) -> tuple[RolloutBackend, Plugin]:
    """Return a rollout engine of another environment, and the plugin that offers it.

    Args:
        python: the interpreter of that environment.
        name: name of the engine.
        plugins: the run's plugins, loaded here.

    Raises:
        PluginError: the environment has no such engine, or lacks a plugin that builds or registers the sampler's model;
            the message names the interpreter.
    """
    question = {
        "name": name,
        "modules": list(plugins.modules),
        "root": str(plugins.root),
        "allow_code": plugins.allow_code,
        "other": not any(hasattr(plugin.module, hook) for plugin in plugins.named for hook in MODEL_HOOKS),
    }
    found = ask(python, json.dumps({**question, "table": None}))
    model = _option_model(python, json.dumps(question), json.dumps(found["keys"]))
    capabilities = frozenset(found["capabilities"]) - OUT_OF_REACH
    families = found["families"]
    spec = RolloutBackend(load=ENGINE, config=model, capabilities=capabilities, families=families)
    label = f"{found['label']} of {python}"
    plugin = Plugin(
        ModuleType(f"engine_foreign_{name.replace(':', '_')}"), label, found["source"], found["version"]
    )
    return spec, plugin


@functools.lru_cache(maxsize=16)  # one class per question, so that equal options compare equal
def _option_model(python: str, question: str, keys: str) -> type[BaseModel]:
    """Return a model with the keys of the plugin's model; the other environment validates the values."""
    about_it = json.loads(question)

    class Foreign(Options):
        _other_policy: str = PrivateAttr("")

        @property
        def other_policy(self) -> str:
            """Keys that make the sampler another policy than its weights, as ``RolloutBackend`` says; "" if none."""
            return self._other_policy

        @model_validator(mode="wrap")
        @classmethod
        def _judged_there(cls, data: Any, handler: Any) -> Any:
            found = ask(python, json.dumps({**about_it, "table": data}, default=str))
            if found["errors"]:
                raise ValidationError.from_exception_data(
                    cls.__name__, [_detail(error) for error in found["errors"]]
                )
            made = cls.model_construct(**found["options"])
            made._other_policy = found["other_policy"]
            return made

    made: dict[str, Any] = dict.fromkeys(json.loads(keys), (Any, None))
    model: type[BaseModel] = create_model("ForeignOptions", __base__=Foreign, **made)
    return model


def _detail(error: Mapping[str, Any]) -> InitErrorDetails:
    """Return an error of the other environment's pydantic, with its location and message."""
    kind, message = error["type"], error["msg"]
    context: dict[str, Any] = {}
    if kind in ("value_error", "assertion_error"):  # without pydantic's prefix
        context["error"] = message.partition(", ")[2]
    elif kind not in ("extra_forbidden", "missing"):
        kind = "elsewhere"
    text = message.replace("{", "{{").replace("}", "}}")
    custom = PydanticCustomError(kind, text, context)
    return InitErrorDetails(type=custom, loc=tuple(error["loc"]), input=error["input"])


@functools.lru_cache(maxsize=64)
def ask(python: str, question: str) -> dict[str, Any]:
    """Send a question (JSON) to another environment; return the answer once its ``versions`` match.

    Raises:
        PluginError: the interpreter does not start or answer, a distribution of ``versions`` is missing or differs, or
            the plugin does not load.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_AN_INTERPRETER}
    where = f"rollout.process.python: {python}"
    try:
        answered = subprocess.run(
            [python, "-P", "-m", "engine_plugin_processes.foreign_interpreter"],
            input=question, capture_output=True, text=True, env=environment, timeout=ASK_SECONDS,
        )  # fmt: skip
    except OSError as error:
        raise PluginError(
            f"{where} does not start: {error.strerror}. Name the interpreter of an environment, such as "
            "serve/bin/python; python -m venv serve makes one."
        ) from None
    except subprocess.TimeoutExpired:
        raise PluginError(
            f"{where} has not described its plugins within {ASK_SECONDS:g} s. What does the plugin do while it is imported?"
        ) from None
    if answered.returncode != 0:
        if distribution := missing_distribution(answered.stderr):
            raise PluginError(without(python, distribution))
        last = "\n".join(answered.stderr.strip().splitlines()[-5:]) or "no message"
        raise PluginError(f"{where} cannot describe its plugins (exit code {answered.returncode}): {last}")
    found: dict[str, Any] = json.loads(answered.stdout.splitlines()[-1])
    compare(python, found, versions())
    if "refused" in found:
        raise PluginError(f"{where}: {found['refused']}")
    return found


def versions() -> dict[str, str]:
    """Return the distributions that must be equal on both sides, with their versions."""
    return {PACKAGES[each.__name__]: each.__version__ for each in (engine_core, engine_plugin_processes)}


def compare(python: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Check that an interpreter's ``versions`` are those of the trainer.

    Raises:
        PluginError: a distribution differs; the message says which one and how to install the right one.
    """
    for name in versions():
        if theirs.get(name) != mine[name]:
            raise PluginError(
                f"rollout.process.python: {python} has {name} {theirs.get(name) or 'of another version'}, and the trainer "
                f"has {mine[name]}. Both must be the same: {_installation(python)}"
            )


def missing_distribution(printed: str) -> str | None:
    """Return the distribution of ``versions`` whose failed import an interpreter printed, or None."""
    found = re.search(rf"No module named '?({'|'.join(PACKAGES)})\b", printed)
    return PACKAGES[found[1]] if found else None


def without(python: str, distribution: str) -> str:
    """Return the message about an interpreter that lacks a distribution of ``versions``."""
    return (
        f"rollout.process.python: {python} has no {distribution} {versions()[distribution]}. Install it there, and the "
        f"rollout plugin: {_installation(python)}"
    )


def _installation(python: str) -> str:
    """Return the command that installs the trainer's ``versions`` in an environment."""
    return " ".join(
        [python, "-m pip install", *(f"{name}=={version}" for name, version in versions().items())]
    )


# -- there --------------------------------------------------------------


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return this environment's answer to a question of ``ask``."""
    found: dict[str, Any] = versions()
    root, allow_code = Path(question["root"]), question["allow_code"]
    try:
        plugins = load_backend(question["name"], question["modules"], root, allow_code, question["other"])
    except EngineError as error:
        return found | {"refused": str(error)}
    spec, plugin = plugins.chosen["rollout_engines", question["name"]]
    assert isinstance(spec, RolloutBackend)
    found |= {
        "label": plugin.label,
        "source": plugin.source,
        "version": plugin.version,
        "capabilities": sorted(spec.capabilities),
        "families": dict(resolve(spec.families)) if spec.families else {},
        "keys": list(spec.config.model_fields),
        "errors": [],
    }
    if question["table"] is not None:
        given = {"folder": root, "allow_code": allow_code}
        try:
            made = spec.config.model_validate_json(json.dumps(question["table"]), strict=True, context=given)
            found["options"] = made.model_dump(mode="json")
            found["other_policy"] = getattr(made, "other_policy", "")
        except ValidationError as error:
            found["errors"] = [
                {"type": one["type"], "loc": one["loc"], "msg": one["msg"], "input": one["input"]}
                for one in error.errors(include_url=False, include_context=False)
            ]
    return found


def main() -> None:
    """Answer the question on stdin, as the last line on stdout."""
    print("\n" + json.dumps(answer(json.load(sys.stdin)), default=str))


if __name__ == "__main__":
    main()
