"""Import of a plugin's module, and checks of its hooks, tables, signatures and capabilities.

Errors name the plugin. An absent module and a broken module are different errors: the first asks for a
reinstallation, the second shows the plugin's line.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from engine_core import hooks as hookspecs
from engine_core.errors import EngineError, PluginError, did_you_mean, lacks_memory, near
from engine_core.plugins.metadata import CORE, TABLES, Offer, find, offer_problem, our_plugins
from engine_core.specs import TABLE_SPECS, RefillOptions, Spec

if TYPE_CHECKING:
    import pluggy

    from engine_core.plugins.plugin_set import Plugin

log = logging.getLogger("engine")

SLOW_IMPORT_SECONDS = 60.0
"""After this time a warning names the plugin that is still being imported."""

HOOKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if name.startswith("engine_")
}
"""The core's hooks, each with the names of its arguments."""


def table_module(kind: str) -> ModuleType | None:
    """Import and return the module in which a plugin defines a table; None if no installed plugin defines it.

    The module has the hook specification ``engine_<kind>`` and ``SPECS``, the spec class by kind.

    Raises:
        PluginError: two plugins define the table, or its module is broken.
    """
    offers = list(find(TABLES, kind))
    if len(offers) > 1:
        sources = " and by ".join(str(offer.distribution) for offer in offers)
        raise PluginError(f"The table '{kind}' is defined by {sources}. Uninstall one of them.")
    if not offers:
        return None
    module = import_offer(offers[0])
    found = getattr(module, "SPECS", {}).get(kind)
    marked = hasattr(getattr(module, f"engine_{kind}", None), "engine_spec")
    if not (isinstance(found, type) and issubclass(found, Spec) and marked):
        raise PluginError(
            f"{offers[0]}: '{module.__name__}' must have SPECS with a subclass of Spec for '{kind}', and the hook "
            f"engine_{kind}, marked @hookspec."
        )
    return module


def spec_class(kind: str) -> type[Spec]:
    """Return the class of the specs of a table, of the core or of the plugin that defines the table.

    Raises:
        PluginError: neither the core nor a plugin defines the table.
    """
    if kind in TABLE_SPECS:
        return TABLE_SPECS[kind]
    module = table_module(kind)
    if module is None:
        raise PluginError(f"There is no table '{kind}'.{did_you_mean(kind, TABLE_SPECS)}")
    found: type[Spec] = module.SPECS[kind]
    return found


def hook_arguments(hook: str) -> tuple[str, ...] | None:
    """Return the names of a hook's arguments; None if neither the core nor an installed plugin defines the hook."""
    if hook in HOOKS:
        return HOOKS[hook]
    module = table_module(hook.removeprefix("engine_"))
    return None if module is None else tuple(inspect.signature(getattr(module, hook)).parameters)


def import_offer(offer: Offer) -> ModuleType:
    """Import and return the module of an entry point, after checking the core version that it requires.

    Raises:
        PluginError: the module is made for another core version, absent or broken; nothing was registered.
    """
    if problem := offer_problem(offer):
        raise PluginError(f"{offer} {problem}")
    return _import(str(offer), offer.module)


def import_load(label: str, load: str) -> Any:
    """Import and return the class or function of a spec's ``"module:attribute"``.

    Raises:
        PluginError: the module is absent or broken, or has no such attribute.
    """
    module, _, attribute = load.partition(":")
    found = _import(label, module)
    if not hasattr(found, attribute):
        known = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
        raise PluginError(f"{label}: '{load}' has no '{attribute}'.{did_you_mean(attribute, known)}")
    return getattr(found, attribute)


def _import(label: str, module: str) -> ModuleType:
    said = "%s: '%s' is still being imported after %g s."
    slow = threading.Timer(SLOW_IMPORT_SECONDS, log.warning, (said, label, module, SLOW_IMPORT_SECONDS))
    slow.daemon = True
    slow.start()
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as exc:
        raise _import_error(label, module, exc) from exc
    finally:
        slow.cancel()


def _import_error(label: str, module: str, exc: BaseException) -> EngineError:
    if isinstance(exc, EngineError):  # its message names the problem of the machine or the plugin
        exc.add_note(f"{label} raised this while it was imported.")
        return exc
    if isinstance(exc, ModuleNotFoundError) and exc.name and f"{module}.".startswith(f"{exc.name}."):
        return PluginError(
            f"{label} is absent: its metadata is installed, its module '{module}' is not. Reinstall the distribution."
        )
    return PluginError(f"{label} is broken, it does not import: {describe(exc, module)}")


def describe(exc: BaseException, module: str) -> str:
    """Return ``ValueError: text (file.py:7: the line)``, with the innermost line of the plugin.

    Args:
        exc: the exception.
        module: a module of the plugin; all lines of its top-level package are the plugin's.
    """
    text = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{text}: {(exc.text or '').strip()}"
    package = module.partition(".")[0]
    for frame, number in reversed(list(traceback.walk_tb(exc.__traceback__))):
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            file = frame.f_code.co_filename
            return f"{text} ({file}:{number}: {linecache.getline(file, number).strip()})"
    return text


def blamed(error: Exception, plugins: Iterable[Plugin]) -> Exception:
    """Return a PluginError that names the plugin whose code raised ``error``; ``error`` itself if that was none.

    Errors of the engine, of the system and of lack of memory stay what they are.

    Args:
        error: what a call raised in this process.
        plugins: those that may be named; the distributions of this project are not, since their failures are the engine's.
    """
    if lacks_memory(error) or isinstance(error, EngineError | OSError):
        return error
    ours = {CORE, *our_plugins().values()}
    foreign = {
        plugin.module.__name__.partition(".")[0]: plugin for plugin in plugins if plugin.source not in ours
    }
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in foreign:
            plugin = foreign[package]
            named = PluginError(f"{plugin.label} failed: {describe(error, package)}")
            named.__cause__ = error
            return named
    return error


class _FileLoader(importlib.machinery.SourceFileLoader):
    """A loader that runs exactly the bytes that were hashed; it neither reads nor writes a cached .pyc."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile the hashed bytes."""
        return self.source_to_code(self.source, self.path)


def import_file(entry: str, root: Path, allow_code: bool) -> tuple[ModuleType, str]:
    """Import a one-file plugin.

    Args:
        entry: the file's path as in ``plugins = [...]``, relative to ``root``.
        root: the TOML's folder.
        allow_code: run files outside ``root`` too.

    Returns:
        The module, and ``sha256:...`` of the code, which is logged.

    Raises:
        PluginError: the file is absent, broken, or outside ``root`` without ``allow_code``.
    """
    path = (root / entry).resolve()
    label = f"Plugin file '{entry}'"
    if not path.is_file():
        hint = near(path.name, [file.name for file in path.parent.glob("*.py")])
        raise PluginError(f"{label} is absent: there is no file {path}.{hint}")
    if not allow_code and not path.is_relative_to(root.resolve()):
        raise PluginError(
            f"{label} lies outside the run file's folder ({root.resolve()}), and its code would run with your "
            "rights. Move it there, or allow it with --allow-code (allow_code=True)."
        )
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    stem = re.sub(r"\W", "_", path.stem)
    name = f"engine_file_plugin_{stem}_{hashlib.sha256(str(path).encode() + source).hexdigest()[:12]}"
    if name not in sys.modules:
        log.info("Plugin file %s: sha256 %s", path, digest)
        _run_file(name, path, source, label)
    return sys.modules[name], f"sha256:{digest[:12]}"


def _run_file(name: str, path: Path, source: bytes, label: str) -> None:
    loader = _FileLoader(name, str(path), source)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses look up their module
    try:
        loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[name]
        if not isinstance(exc, (Exception, SystemExit)):
            raise
        raise _import_error(label, name, exc) from exc


def hook_problems(manager: pluggy.PluginManager, module: ModuleType, label: str) -> Iterator[str]:
    """Yield the problems of a module's hooks: a misspelt name, a wrong argument, a missing marker."""
    for name, function in sorted(vars(module).items(), key=lambda item: item[0]):
        marked = manager.parse_hookimpl_opts(module, name) is not None
        if not marked and not (name.startswith("engine_") and inspect.isfunction(function)):
            continue
        known = hook_arguments(name)
        if not marked:
            if known is not None and function.__module__ == module.__name__:
                yield f"{label}: '{name}' is not marked, so it would never be called. Write @hookimpl above it."
        elif known is None:
            yield f"{label}: there is no hook '{name}'.{did_you_mean(name, HOOKS)}"
        else:
            for argument in inspect.signature(function).parameters:
                if argument not in known:
                    hint = did_you_mean(argument, known)
                    yield f"{label}: hook '{name}' has no argument '{argument}'.{hint}"


TRAIN_CAPABILITIES = {
    "generation_module": "generation_module",
    "late_scale": "scale_gradients",
    "common_checkpoints": "load",  # reads checkpoints of any engine with this capability: they share a format
    "lora": "without_adapter",
    "set_lr": "set_lr",
    "sleep": "sleep",
    "support": "infer",
}
"""Capabilities that a train engine may declare, each with the method that its class must then override."""
ROLLOUT_CAPABILITIES = {
    "share_module": "share_module",
    "pause": "pause",
    "sleep": "sleep",
    "support": "add",  # accepts requests with ``Sampling.max_support``
    "custom_model": "update_weights",  # of the module that ``engine_build_model`` builds for the role ``rollout``
    "partial": "abort",  # in the middle of a response, and ``add`` continues that response
}
"""Capabilities that a rollout engine may declare, each with the method that its class must then override."""

CAPABILITIES = {"train_engines": TRAIN_CAPABILITIES, "rollout_engines": ROLLOUT_CAPABILITIES}
CONTRACTS = {"train_engines": "TrainEngine", "rollout_engines": "RolloutEngine"}
CONTRACT_MODULE = "engine_core.contracts.engines"  # a name, because engines import this module


def check_table(label: str, kind: str, table: Any) -> None:
    """Check that a table hook returned ``{name: spec}`` with specs of the hook's kind.

    Raises:
        PluginError: the value is no such table, or one of its specs cannot be used.
    """
    expected = spec_class(kind)
    wanted = f"engine_{kind} must return {{name: {expected.__name__}(...)}}"
    if not isinstance(table, Mapping):
        raise PluginError(f"{label}: {wanted}, got {_shown(table)}.")
    for name, spec in table.items():
        if not isinstance(spec, expected):
            raise PluginError(f"{label}: {wanted}, but '{name}' is {_shown(spec)}.")
        if not (isinstance(spec.config, type) and issubclass(spec.config, BaseModel)):
            got = f"must be a pydantic model class, got {_shown(spec.config)}"
            raise PluginError(f"{label}: 'config' of '{name}' {got}.")
        if not callable(spec.load) and not isinstance(spec.load, str):
            got = f"must be 'module:attribute' or the object itself, got {_shown(spec.load)}"
            raise PluginError(f"{label}: 'load' of '{name}' {got}.")
        of_file = label.startswith("Plugin file") and isinstance(spec.load, str) and spec.load
        if of_file and not _is_installed(str(spec.load).partition(":")[0]):
            raise PluginError(
                f"{label}: 'load' of '{name}' is '{spec.load}', and no such module is installed. A plugin file gives the "
                "object itself, from this file, or becomes a package (engine new plugin)."
            )
        known = CAPABILITIES.get(kind, {})
        for capability in sorted(getattr(spec, "capabilities", frozenset()) - set(known)):
            hint = did_you_mean(capability, known)
            raise PluginError(f"{label}: unknown capability '{capability}' of a {spec.noun}.{hint}")


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def check_signature(label: str, spec: Spec, found: Callable[..., Any]) -> None:
    """Check that a function, or a class and its objects, can be called with the arguments of its kind.

    Raises:
        PluginError: an argument is missing or unexpected, or a class lacks a method.
    """
    options = set(spec.config.model_fields) | getattr(spec, "keywords", frozenset())
    if issubclass(spec.config, RefillOptions):  # read by the trainer, not by the stage
        options -= set(RefillOptions.model_fields)
    if not (isinstance(found, type) and spec.methods):
        _check_call(f"{label} must be callable as f", found, spec.given, options)
        return
    _check_call(f"{label} must be made as {found.__name__}", found, (), options)
    call = next((vars(base)["__call__"] for base in found.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        given = ", ".join(spec.given)
        raise PluginError(f"{label}: objects of {found.__name__} must be callable as f({given}).")
    _check_call(f"{label}: its objects must be callable as f", call, ("self", *spec.given), ())
    if missing := [name for name in spec.methods if not hasattr(found, name)]:
        raise PluginError(
            f"{label}: {found.__name__} has no {' and no '.join(missing)}, so a resumed run would lose its state. "
            f"A {spec.noun} without state is a function."
        )


def _check_call(must: str, found: Callable[..., Any], given: Sequence[str], options: Collection[str]) -> None:
    try:
        inspect.signature(found).bind(*given, **dict.fromkeys(options))
    except TypeError as exc:
        shown = [name for name in given if name != "self"]
        call = ", ".join([*shown, *(["*", *sorted(options)] if options else [])])
        raise PluginError(f"{must}({call}): {exc}.") from exc


def check_engine(label: str, spec: Any, found: Any) -> None:
    """Check that an engine class implements its contract and the capabilities that its spec declares.

    Raises:
        PluginError: the class lacks something; the message names it.
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
