"""Check what a plugin offers: its tables, the signatures of its functions, its engine classes.

Each check raises a ``PluginError`` that names the plugin, what it gave and what was expected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from engine_core.errors import PluginError, did_you_mean
from engine_core.plugins.modules import spec_class
from engine_core.specs import RefillOptions, Spec

TRAIN_CAPABILITIES = {
    "generation_module": "generation_module",
    "common_checkpoints": "load",  # of any engine that writes those of ``engine_plugin_torch.state.FORMAT``
    "lora": "without_adapter",
    "set_lr": "set_lr",
    "sleep": "sleep",
    "support": "infer",
}
"""Capabilities that a train engine may declare, each with the method that its class must then implement itself."""
ROLLOUT_CAPABILITIES = {
    "share_module": "share_module",
    "pause": "pause",
    "sleep": "sleep",
    "support": "add",  # of requests with ``Sampling.max_support``
    "partial": "abort",  # in the midst of a response, and ``add`` of what it gave
}
"""Capabilities that a rollout engine may declare, each with the method that its class must then implement itself."""

CAPABILITIES = {"train_engines": TRAIN_CAPABILITIES, "rollout_engines": ROLLOUT_CAPABILITIES}
CONTRACTS = {"train_engines": "TrainEngine", "rollout_engines": "RolloutEngine"}
CONTRACT_MODULE = "engine_core.contracts.engines"  # named, not imported: engines stand above this module


def check_table(label: str, kind: str, table: Any) -> None:
    """Refuse what a table hook returned, unless it is ``{name: spec}`` with specs of the hook's kind.

    Raises:
        PluginError: it is no such table, or a spec of it cannot be used.
    """
    expected = spec_class(kind)
    wanted = f"engine_{kind} must return {{name: {expected.__name__}(...)}}"
    if not isinstance(table, Mapping):
        raise PluginError(f"{label}: {wanted}, got {_shown(table)}.")
    for name, spec in table.items():
        if not isinstance(name, str):
            raise PluginError(f"{label}: {wanted}, got the name {_shown(name)}.")
        if not isinstance(spec, expected):
            raise PluginError(f"{label}: {wanted}, but '{name}' is {_shown(spec)}.")
        if not (isinstance(spec.config, type) and issubclass(spec.config, BaseModel)):
            got = f"must be a pydantic model class, got {_shown(spec.config)}"
            raise PluginError(f"{label}: 'config' of '{name}' {got}.")
        given = getattr(spec, "role", "")  # a column that a role gives has nothing to load
        if (
            not given
            and not callable(spec.load)
            and not (isinstance(spec.load, str) and all(spec.load.partition(":")))
        ):
            got = f"must be 'module:attribute' or the object itself, got {_shown(spec.load)}"
            raise PluginError(f"{label}: 'load' of '{name}' {got}.")
        _check_capability_names(label, spec)


def _check_capability_names(label: str, spec: Any) -> None:
    """Refuse a capability that does not exist, without importing the engine; ``check_engine`` checks that the engine brings it."""
    known = CAPABILITIES.get(spec.kind, {})
    for capability in sorted(getattr(spec, "capabilities", frozenset()) - set(known)):
        hint = did_you_mean(capability, known)
        raise PluginError(f"{label}: unknown capability '{capability}' of a {spec.noun}.{hint}")


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def check_signature(label: str, spec: Spec, found: Callable[..., Any]) -> None:
    """Refuse a function, or a class and its objects, that its caller could not call.

    Raises:
        PluginError: an argument is missing or too many, or a class lacks what a checkpoint needs.
    """
    options = set(spec.config.model_fields) | getattr(spec, "keywords", frozenset())
    if issubclass(spec.config, RefillOptions):  # read by the trainer, not by the stage
        options -= set(RefillOptions.model_fields)
    if not (isinstance(found, type) and spec.makes_objects):
        _check_call(f"{label} must be callable as f", found, spec.given, options)
        return
    _check_call(f"{label} must be made as {found.__name__}", found, (), options)
    call = next((vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        given = ", ".join(spec.given)
        raise PluginError(f"{label}: objects of {found.__name__} must be callable as f({given}).")
    _check_call(f"{label}: its objects must be callable as f", call, ("self", *spec.given), ())
    if missing := [name for name in ("state", "load_state") if not hasattr(found, name)]:
        raise PluginError(
            f"{label}: {found.__name__} has no {' and no '.join(missing)}, so a resumed run would go on without what "
            "it keeps. A stage that keeps nothing is a function."
        )


def _check_call(must: str, found: Callable[..., Any], given: Sequence[str], options: Collection[str]) -> None:
    try:
        inspect.signature(found).bind(*given, **dict.fromkeys(options))
    except TypeError as exc:
        shown = [name for name in given if name != "self"]
        call = ", ".join([*shown, *(["*", *sorted(options)] if options else [])])
        raise PluginError(f"{must}({call}): {exc}.") from exc


def check_engine(label: str, spec: Any, found: Any) -> None:
    """Refuse an engine class that does not fulfil its contract, or lacks a capability that its spec declares.

    Raises:
        PluginError: with what the class lacks.
    """
    contract, capabilities = CONTRACTS[spec.kind], CAPABILITIES[spec.kind]
    if not isinstance(found, type) or not any(
        (base.__module__, base.__name__) == (CONTRACT_MODULE, contract) for base in found.__mro__
    ):
        raise PluginError(f"{label}: {_shown(found)} is not a subclass of {CONTRACT_MODULE}.{contract}.")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise PluginError(f"{label}: {found.__name__} does not implement {', '.join(missing)} of {contract}.")
    for capability in sorted(spec.capabilities):
        method = capabilities[capability]
        owner = next(base for base in found.__mro__ if method in vars(base))
        if owner.__module__ == CONTRACT_MODULE:
            raise PluginError(
                f"{label} declares the capability '{capability}', but {found.__name__} does not implement "
                f"'{method}'. Implement it, or leave the capability out."
            )
