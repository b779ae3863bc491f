"""Find, check, load, pick: the plugins of one run.

Only what the run names is imported. Names come from package metadata (``plugin_metadata``), a
module is imported and its hooks are checked (``plugin_modules``), then it is registered with
pluggy, and its tables must hold every name that its metadata promised. All problems of a run are
told at once; what the run does not use cannot hurt it.

Left out on purpose: overriding. A name that two plugins offer is an error for a run that uses it,
until ``"distribution:name"`` picks one.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
from pydantic import BaseModel

import engine_core
from engine_core import hookspecs
from engine_core.errors import EngineError, PluginError, did_you_mean
from engine_core.plugin_listing import PluginInfo, list_plugins
from engine_core.plugin_metadata import CORE, NOUNS, find, installed, known_names, split, unknown_name
from engine_core.plugin_modules import describe, hook_problems, import_file, import_load, import_offer
from engine_core.specs import TABLE_SPECS, RefillOptions, Spec, resolve

__all__ = ["CAPABILITIES", "PluginInfo", "PluginProblems", "PluginSet", "known_names", "list_plugins"]

TRAIN_CAPABILITIES = {
    "generation_module": "generation_module",
    "common_checkpoints": "load",  # of any engine that writes those of ``engines.state.FORMAT``
    "lora": "without_adapter",
    "set_lr": "set_lr",
    "sleep": "sleep",
    "support": "infer",
}
"""What a train engine may declare, and the method that its class must then bring itself."""
ROLLOUT_CAPABILITIES = {
    "share_module": "share_module",
    "pause": "pause",
    "sleep": "sleep",
    "support": "add",  # of requests with ``Sampling.max_support``
    "partial": "abort",  # in the midst of a response, and ``add`` of what it gave
}
"""The same for rollout engines."""

CAPABILITIES = {"train_engines": TRAIN_CAPABILITIES, "rollout_engines": ROLLOUT_CAPABILITIES}
CONTRACTS = {"train_engines": "TrainEngine", "rollout_engines": "RolloutEngine"}
CONTRACT_MODULE = "engine_core.engines.base"  # named, not imported: engines stand above this module

STEP_HOOKS = tuple(
    name for name, spec in vars(hookspecs).items() if getattr(spec, "engine_spec", {}).get("firstresult")
)

log = logging.getLogger("engine")


class PluginProblems(PluginError):
    """Everything that is wrong with the plugins of a run.

    Args:
        problems: kind, name as the run wrote it, message.
        loaded: what could be loaded all the same.
    """

    def __init__(self, problems: Sequence[tuple[str, str, str]], loaded: PluginSet) -> None:
        self.problems, self.loaded = list(problems), loaded
        super().__init__("\n".join(message for _, _, message in problems))


@dataclass(eq=False)
class Plugin:
    """One imported module with hooks."""

    module: ModuleType
    label: str  # for messages, with the version
    source: str  # distribution, or the file's name
    version: str
    tables: dict[str, dict[str, Spec]] = field(default_factory=dict)


class PluginSet:
    """The plugins of one run, in one process. Made by ``PluginSet.load``."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager("engine")
        self.manager.add_hookspecs(hookspecs)
        self.plugins: list[Plugin] = []
        self.named: list[Plugin] = []  # those of `plugins = [...]`
        self.observer_failures = 0
        self.modules: Sequence[str] = ()  # as given to `load`, so that another process can do the same
        self.root, self.allow_code = Path.cwd(), False
        self.chosen: dict[tuple[str, str], tuple[Spec, Plugin]] = {}

    @classmethod
    def load(
        cls,
        names: Mapping[str, Collection[str]],
        modules: Sequence[str] = (),
        root: Path | None = None,
        allow_code: bool = False,
    ) -> PluginSet:
        """Import and check what a run uses, and nothing else.

        Args:
            names: used names by kind: ``{"train_engines": {"torch"}}``. ``"dist:name"`` picks a
                distribution.
            modules: the run file's ``plugins = [...]``: names of the group ``engine.plugins``, and
                paths ending in ``.py``.
            root: folder of the run file; default: the working directory.
            allow_code: run ``.py`` files that lie outside ``root`` too.

        Raises:
            PluginProblems: everything that is wrong, at once.
        """
        plugin_set = cls()
        plugin_set.modules, plugin_set.allow_code = tuple(modules), allow_code
        plugin_set.root = root or plugin_set.root
        if problems := _Loader(plugin_set).load(names):
            raise PluginProblems(problems, plugin_set)
        return plugin_set

    def adopt(self, kind: str, name: str, spec: Spec, plugin: Plugin) -> None:
        """Take a spec from elsewhere: of a plugin that is loaded in another environment, whose module has no hooks."""
        self.manager.register(plugin.module, plugin.module.__name__)
        self.plugins.append(plugin)
        self.chosen[kind, name] = spec, plugin

    def find(self, kind: str, name: str) -> Spec | None:
        """The spec behind a name; None if the run does not use it or it could not be loaded."""
        return self.chosen[kind, name][0] if (kind, name) in self.chosen else None

    def spec(self, kind: str, name: str) -> Spec:
        """The spec behind a name that this run uses."""
        if spec := self.find(kind, name):
            return spec
        raise PluginError(
            f"{NOUNS[kind].capitalize()} '{name}' is not loaded: the run file does not name it."
        )

    def resolve(self, kind: str, name: str) -> Any:
        """The class or function behind a name, imported now; an engine's capabilities are checked."""
        spec = self.spec(kind, name)
        label = self.chosen[kind, name][1].label
        found = import_load(label, spec.load) if isinstance(spec.load, str) else spec.load
        if kind in CONTRACTS:
            _check_engine(label, spec, found)
        return found

    def function(self, kind: str, name: str) -> Callable[..., Any]:
        """``resolve`` for a function, or for a class that is made with its options: ``guarded``.

        Raises:
            PluginError: it cannot be called with the arguments of its kind and its options.
        """
        spec, plugin = self.chosen[kind, name]
        found: Callable[..., Any] = self.resolve(kind, name)
        _check_signature(f"{plugin.label}: {spec.noun} '{name}'", spec, found)
        return self.guarded(kind, name, found)

    def guarded(self, kind: str, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        """``found`` such that what it raises carries the name and version of the plugin behind ``name``.

        An error of the core's own functions passes as it is: it is a bug of ours.
        """
        spec, plugin = self.chosen[kind, name]

        def called(*arguments: Any, **options: Any) -> Any:
            try:
                return found(*arguments, **options)
            except EngineError:
                raise
            except Exception as exc:
                what = describe(exc, plugin.module.__name__)
                raise PluginError(f"{plugin.label}: {spec.noun} '{name}' failed: {what}") from exc

        return found if plugin.source == CORE else called

    def overrides(self, hook: str) -> bool:
        """Whether a plugin of this run implements a step hook."""
        return any(hasattr(plugin.module, hook) for plugin in self.plugins)

    def step(self, role: str, backend: tuple[str, str] | None) -> SimpleNamespace:
        """The step hooks as one role's plugins answer them.

        Args:
            role: for messages.
            backend: ``(kind, name)`` of the role's backend, whose plugin is asked last; plugins of
                other roles' backends are not asked.

        Returns:
            The step hooks by name, as functions of keyword arguments; each gives the first answer,
            or None when the default is to be used. A first, positional argument may be a function
            that tells what is wrong with an answer ("" where nothing is); it is refused with the
            plugin's name.
        """
        asked = self.named[::-1]
        if backend is not None:
            self.spec(*backend)
            asked = list(dict.fromkeys([*asked, self.chosen[backend][1]]))
        return SimpleNamespace(**{hook: partial(self._first, asked, role, hook) for hook in STEP_HOOKS})

    def emit(self, event: str, step: int, data: Mapping[str, Any]) -> None:
        """Tell every observer; a failing one is logged, counted in ``observer_failures``, and passed over."""
        for plugin in reversed(self.plugins):
            try:
                self._caller("engine_on_event", plugin)(event=event, step=step, data=dict(data))
            except Exception:
                self.observer_failures += 1
                log.exception(
                    "%s failed to observe '%s' of step %d; training goes on", plugin.label, event, step
                )

    def versions(self) -> dict[str, str]:
        """Version of the core and of each distribution in use; of a one-file plugin, its hash."""
        return {CORE: engine_core.__version__} | {plugin.source: plugin.version for plugin in self.plugins}

    def _caller(self, hook: str, plugin: Plugin) -> pluggy.HookCaller:
        others = [other.module for other in self.plugins if other is not plugin]
        return self.manager.subset_hook_caller(hook, others)

    def _first(
        self,
        asked: Sequence[Plugin],
        role: str,
        hook: str,
        problem_of: Callable[[Any], str] | None = None,
        /,
        **arguments: Any,
    ) -> Any:
        for plugin in asked:
            answer = self.ask(plugin, role, hook, **arguments)
            if answer is None:
                continue
            if problem_of is not None and (problem := problem_of(answer)):
                raise PluginError(f"{plugin.label}: {hook} ({role}) {problem}")
            return answer
        return None

    def ask(self, plugin: Plugin, asker: str, hook: str, /, **arguments: Any) -> Any:
        """Call a hook of one plugin; what it raises carries its name and version."""
        try:
            return self._caller(hook, plugin)(**arguments)
        except EngineError as exc:
            exc.add_note(f"{plugin.label} raised this in {hook} ({asker}).")
            raise
        except Exception as exc:
            what = describe(exc, plugin.module.__name__)
            raise PluginError(f"{plugin.label} failed in {hook} ({asker}): {what}") from exc


class _Loader:
    """One call of ``PluginSet.load``: goes on after a problem, so that all are found."""

    def __init__(self, plugin_set: PluginSet) -> None:
        self.plugin_set = plugin_set
        self.problems: list[tuple[str, str, str]] = []
        self.imported: dict[str, Plugin | None] = {}  # by module; None: failed, and was told once

    def load(self, names: Mapping[str, Collection[str]]) -> list[tuple[str, str, str]]:
        named = [plugin for entry in self.plugin_set.modules if (plugin := self._named(entry))]
        used = [(kind, name) for kind in names for name in sorted(names[kind])]
        behind = [plugin for kind, name in used if (plugin := self._behind(kind, name))]
        for plugin in dict.fromkeys([*behind, *named]):
            self._register(plugin)
        self.plugin_set.named = [
            plugin for plugin in dict.fromkeys(named) if plugin in self.plugin_set.plugins
        ]
        for kind, name in used:
            self._choose(kind, name)
        return self.problems

    @contextlib.contextmanager
    def _collecting(self, kind: str, name: str) -> Iterator[None]:
        try:
            yield
        except PluginError as exc:
            self.problems.append((kind, name, str(exc)))

    def _named(self, entry: str) -> Plugin | None:
        """The plugin behind an entry of ``plugins = [...]``."""
        if not entry.endswith(".py"):
            plugin = self._behind("plugins", entry)
            if plugin is None and not list(find("plugins", entry)):
                self.problems.append(("plugins", entry, unknown_name("plugins", entry)))
            return plugin
        with self._collecting("plugins", entry):
            module, digest = import_file(entry, self.plugin_set.root, self.plugin_set.allow_code)
            label = f"Plugin file '{entry}' ({digest})"
            plugin = Plugin(module, label, Path(entry).name, digest)
            return self.imported.setdefault(module.__name__, plugin)
        return None

    def _behind(self, kind: str, name: str) -> Plugin | None:
        """The plugin whose metadata offers a name, imported; None if there is none or it failed."""
        offers = list(find(kind, name))
        if len(offers) > 1:
            self._ambiguous(kind, name, [str(offer.distribution) for offer in offers])
        if len(offers) != 1:
            return None
        offer = offers[0]
        if offer.module not in self.imported:
            self.imported[offer.module] = None
            with self._collecting(kind, name):
                source, version = offer.distribution.name, offer.distribution.version
                self.imported[offer.module] = Plugin(import_offer(offer), str(offer), source, version)
        return self.imported[offer.module]

    def _ambiguous(self, kind: str, name: str, sources: Sequence[str]) -> None:
        choices = " or ".join(f"'{source.split(' ')[0]}:{split(name)[1]}'" for source in sources)
        offered = f"{NOUNS[kind].capitalize()} '{name}' is offered by {' and by '.join(sources)}"
        self.problems.append((kind, name, f"{offered}. Write {choices}."))

    def _register(self, plugin: Plugin) -> None:
        """Check the hooks, register, collect and check the tables."""
        plugin_set, name = self.plugin_set, plugin.module.__name__
        wrong = list(hook_problems(plugin_set.manager, plugin.module, plugin.label))
        if not wrong:
            try:
                plugin_set.manager.register(plugin.module, name)
            except pluggy.PluginValidationError as exc:
                wrong = [f"{plugin.label}: {exc}"]
        if wrong:
            self.problems += [("plugins", name, problem) for problem in wrong]
            self.imported[name] = None
            return
        plugin_set.plugins.append(plugin)
        for kind in TABLE_SPECS:
            with self._collecting(kind, plugin.label):
                plugin.tables[kind] = self._table(plugin, kind)

    def _table(self, plugin: Plugin, kind: str) -> dict[str, Spec]:
        """One table of one plugin; it must hold every name that the metadata promised."""
        hook = f"engine_{kind}"
        offers = self.plugin_set._caller(hook, plugin).get_hookimpls()
        answers = self.plugin_set.ask(plugin, "while it was loaded", hook) if offers else [{}]
        table: dict[str, Spec] = {}
        for answer in answers or [None]:  # pluggy leaves None out
            _check_table(plugin.label, kind, answer)
            table |= answer
        module = plugin.module.__name__
        mine = [offer for offer in installed() if offer.distribution.name == plugin.source]
        promised = {offer.name for offer in mine if (offer.kind, offer.module) == (kind, module)}
        for name in sorted(promised - {*table}):
            held = ", ".join(sorted(table)) or "nothing"
            raise PluginError(
                f"{plugin.label} promises the {NOUNS[kind]} '{name}' in its metadata, but {hook} of "
                f"'{module}' gives {held}. The entry point and the table must agree."
            )
        return table

    def _choose(self, kind: str, name: str) -> None:
        """Bind a used name to the one plugin that offers it."""
        distribution, short = split(name)
        offers = list(find(kind, name))
        if len(offers) > 1 or any(self.imported[offer.module] is None for offer in offers):
            return  # told already
        candidates = [plugin for offer in offers if (plugin := self.imported[offer.module])]
        named = [plugin for plugin in self.plugin_set.named if plugin not in candidates]
        candidates += [
            p for p in named if short in p.tables.get(kind, {}) and distribution in (None, p.source)
        ]
        if len(candidates) > 1:
            self._ambiguous(kind, name, [f"{plugin.source} {plugin.version}" for plugin in candidates])
        elif not candidates:
            also = {other for plugin in named for other in plugin.tables.get(kind, {})}
            self.problems.append((kind, name, unknown_name(kind, name, also)))
        elif spec := candidates[0].tables.get(kind, {}).get(short):  # else: its table failed, told already
            self.plugin_set.chosen[kind, name] = spec, candidates[0]


def _check_table(label: str, kind: str, table: Any) -> None:
    """A table hook returns ``{name: spec}`` with specs of its own kind."""
    expected = TABLE_SPECS[kind]
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
        if not callable(spec.load) and not (isinstance(spec.load, str) and all(spec.load.partition(":"))):
            got = f"must be 'module:attribute' or the object itself, got {_shown(spec.load)}"
            raise PluginError(f"{label}: 'load' of '{name}' {got}.")
        _check_capability_names(label, spec)


def _check_capability_names(label: str, spec: Any) -> None:
    """Said without importing the engine; that it brings them is checked when it is imported."""
    known = CAPABILITIES.get(spec.kind, {})
    for capability in sorted(getattr(spec, "capabilities", frozenset()) - set(known)):
        hint = did_you_mean(capability, known)
        raise PluginError(f"{label}: unknown capability '{capability}' of a {spec.noun}.{hint}")


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def _check_signature(label: str, spec: Spec, found: Callable[..., Any]) -> None:
    """Refuse a function, or a class and its objects, that its caller could not call."""
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


def _check_engine(label: str, spec: Any, found: Any) -> None:
    """An engine class fulfils its contract and brings each capability that its spec declares."""
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


def probe(targets: Sequence[str]) -> None:
    """The subprocess of ``list_plugins(check=True)``: load ``kind=dist:name`` each, and print its problem and what it says of the machine.

    One line of JSON each, at once: it may not live to the next. What plugins print goes to stderr.
    """
    gc.disable()  # a short life, nearly all of it imports: collecting takes a fifth of them
    with os.fdopen(os.dup(1), "w", buffering=1) as told:
        os.dup2(2, 1)
        for target in targets:
            kind, _, name = target.partition("=")
            problem, health = None, ("", True)
            try:
                if kind == "plugins":
                    PluginSet.load({}, [name])
                else:
                    plugins = PluginSet.load({kind: [name]})
                    plugins.resolve(kind, name)
                    health = _health(plugins.spec(kind, name))
            except EngineError as exc:
                problem = str(exc)
            print(json.dumps([target, problem, *health]), file=told)


def _health(spec: Spec) -> tuple[str, bool]:
    """What a spec says of this machine, and whether that is well."""
    if spec.health is None:
        return "", True
    try:
        return resolve(spec.health)(), True
    except EngineError as exc:
        return str(exc), False
