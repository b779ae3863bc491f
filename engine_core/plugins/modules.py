"""Importing one plugin's module and checking its hooks, with errors that name the plugin.

An absent module and a broken one are different errors: the first asks for a reinstallation, the
second shows the plugin's own line.
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
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from engine_core import hooks as hookspecs
from engine_core.errors import EngineError, PluginError, did_you_mean, nearest
from engine_core.plugins.metadata import TABLES, Offer, find, offer_problem
from engine_core.specs import TABLE_SPECS, Spec

if TYPE_CHECKING:
    import pluggy

HOOKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if name.startswith("engine_")
}
"""Every hook and the names of its arguments."""

log = logging.getLogger("engine")


def table_module(kind: str) -> ModuleType | None:
    """Return the module that defines a table of a plugin, imported now; None where no installed plugin defines the table.

    The module has the hook specification ``engine_<kind>`` and ``SPECS``, the class of spec by kind.

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
    specs: Any = getattr(module, "SPECS", None)
    found = specs.get(kind) if isinstance(specs, Mapping) else None
    if not (isinstance(found, type) and issubclass(found, Spec)):
        raise PluginError(f"{offers[0]}: SPECS of '{module.__name__}' must give '{kind}' a subclass of Spec.")
    if not hasattr(getattr(module, f"engine_{kind}", None), "engine_spec"):
        raise PluginError(
            f"{offers[0]}: '{module.__name__}' must have the hook engine_{kind}, marked @hookspec."
        )
    return module


def spec_class(kind: str) -> type[Spec]:
    """Return the class of the specs of a table, of the core or of the plugin that defines the table.

    Raises:
        PluginError: nothing defines it.
    """
    if kind in TABLE_SPECS:
        return TABLE_SPECS[kind]
    module = table_module(kind)
    if module is None:
        raise PluginError(f"There is no table '{kind}'.{did_you_mean(kind, TABLE_SPECS)}")
    found: type[Spec] = module.SPECS[kind]
    return found


def hook_arguments(hook: str) -> tuple[str, ...] | None:
    """Return the names of a hook's arguments; None where neither the core nor an installed plugin defines the hook."""
    if hook in HOOKS:
        return HOOKS[hook]
    module = table_module(hook.removeprefix("engine_"))
    return None if module is None else tuple(inspect.signature(getattr(module, hook)).parameters)


def import_offer(offer: Offer) -> ModuleType:
    """The module behind an entry point, once its demand on the core's version was checked.

    Raises:
        PluginError: made for another core, absent, or broken; nothing was registered.
    """
    if problem := offer_problem(offer):
        raise PluginError(f"{offer} {problem}")
    return _import(str(offer), offer.module)


def import_load(label: str, load: str) -> Any:
    """The class or function behind a spec's ``"module:attribute"``."""
    module, _, attribute = load.partition(":")
    found = _import(label, module)
    if not hasattr(found, attribute):
        known = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
        raise PluginError(f"{label}: '{load}' has no '{attribute}'.{did_you_mean(attribute, known)}")
    return getattr(found, attribute)


def _import(label: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as exc:
        raise _import_error(label, module, exc) from exc


def _import_error(label: str, module: str, exc: BaseException) -> EngineError:
    if isinstance(exc, EngineError):  # it says itself what is wrong with the machine or the plugin
        exc.add_note(f"{label} raised this while it was imported.")
        return exc
    if isinstance(exc, ModuleNotFoundError) and exc.name and f"{module}.".startswith(f"{exc.name}."):
        return PluginError(
            f"{label} is absent: its metadata is installed, its module '{module}' is not. Reinstall the distribution."
        )
    return PluginError(f"{label} is broken, it does not import: {describe(exc, module)}")


def describe(exc: BaseException, module: str) -> str:
    """``ValueError: text (file.py:7: the line)``: the innermost line of the plugin itself.

    Args:
        exc: what was raised.
        module: the plugin's lines are those of its top-level package.
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


class _FileLoader(importlib.machinery.SourceFileLoader):
    """Runs exactly the bytes that were hashed; neither reads nor writes a cached .pyc."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source, self.path)


def import_file(entry: str, root: Path, allow_code: bool) -> tuple[ModuleType, str]:
    """A plugin in one file.

    Args:
        entry: its path as in ``plugins = [...]``, relative to ``root``.
        root: the TOML's folder; code elsewhere is run only if ``allow_code``.

    Returns:
        The module, and ``sha256:...`` of what was run, which is logged.
    """
    path = (root / entry).resolve()
    label = f"Plugin file '{entry}'"
    if not path.is_file():
        match = nearest(path.name, [file.name for file in path.parent.glob("*.py")])
        hint = f" Did you mean '{match}'?" if match else ""
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
    sys.modules[name] = module  # before running: dataclasses look their module up
    try:
        loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[name]
        if not isinstance(exc, (Exception, SystemExit)):
            raise
        raise _import_error(label, name, exc) from exc


def hook_problems(manager: pluggy.PluginManager, module: ModuleType, label: str) -> Iterator[str]:
    """What is wrong with a module's hooks: a misspelt name, a wrong argument, a missing marker."""
    for name in dir(module):
        function = inspect.getattr_static(module, name)
        options = manager.parse_hookimpl_opts(module, name)
        if options is None:
            if (
                name.startswith("engine_")
                and hook_arguments(name) is not None
                and getattr(function, "__module__", None) == module.__name__
            ):
                yield f"{label}: '{name}' is not marked, so it would never be called. Write @hookimpl above it."
            continue
        hook = options.get("specname") or name
        if hook_arguments(hook) is None:
            if not options.get("optionalhook"):
                yield f"{label}: there is no hook '{hook}'.{did_you_mean(hook, HOOKS)}"
            continue
        yield from _argument_problems(label, hook, getattr(module, name))


def _argument_problems(label: str, hook: str, function: Any) -> Iterator[str]:
    known = hook_arguments(hook) or ()
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if name not in known:
            arguments = did_you_mean(name, known)
            yield f"{label}: hook '{hook}' has no argument '{name}'.{arguments}"
        elif parameter.default is not parameter.empty:
            yield (
                f"{label}: argument '{name}' of hook '{hook}' has a default, so it would never be passed. "
                "Remove the default."
            )
