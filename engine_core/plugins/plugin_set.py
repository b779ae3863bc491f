"""The plugins of one run: discovery, checks, loading and choice.

Only plugins that the run names are imported. Names come from package metadata (``metadata``). A module is
imported and its hooks are checked (``modules``), then it is registered with pluggy. Its tables are
checked and must hold every name of the metadata. All problems of a run are reported at once. A broken
plugin that the run does not use has no effect.

Plugins cannot override each other's names. A run that uses a name that two plugins offer fails until
``"distribution:name"`` picks one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
from pydantic import BaseModel, ValidationError

import engine_core
from engine_core import hooks as hookspecs
from engine_core.errors import EngineError, PluginError
from engine_core.plugins.metadata import (
    CORE,
    find,
    installed,
    known_names,
    nouns,
    our_plugins,
    split,
    unknown_name,
)
from engine_core.plugins.modules import (
    CAPABILITIES,
    CONTRACTS,
    check_engine,
    check_signature,
    check_table,
    describe,
    hook_problems,
    import_file,
    import_load,
    import_offer,
)
from engine_core.specs import NoOptions, Spec

__all__ = ["CAPABILITIES", "Plugin", "PluginProblems", "PluginSet", "known_names"]

STEP_HOOKS = tuple(
    name for name, spec in vars(hookspecs).items() if getattr(spec, "engine_spec", {}).get("firstresult")
)

log = logging.getLogger("engine")


class PluginProblems(PluginError):
    """All problems of the plugins of a run.

    Args:
        problems: kind, name as the run wrote it, and message of each problem.
        loaded: the set with the plugins that loaded.
    """

    def __init__(self, problems: Sequence[tuple[str, str, str]], loaded: PluginSet) -> None:
        self.problems, self.loaded = list(problems), loaded  #: constructor argument
        super().__init__("\n".join(message for _, _, message in problems))


@dataclass(frozen=True, kw_only=True)
class _PluginOptions(Spec):
    """The options of a plugin in ``plugins = [...]``."""

    noun = "plugin"


@dataclass(eq=False)
class Plugin:
    """An imported module with hooks."""

    module: ModuleType  #: the module with the hooks
    label: str  #: for messages, with the version
    source: str  #: distribution, or the file's name
    version: str  #: of the distribution; of a file: a part of its hash
    tables: dict[str, dict[str, Spec]] = field(default_factory=dict)  #: specs by kind and name
    options: BaseModel | None = None  #: of `[plugin.NAME]`; None: the hook of its options is missing


class PluginSet:
    """The plugins of one run in one process; create it with ``PluginSet.load``."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager("engine")
        self.manager.add_hookspecs(hookspecs)
        self.plugins: list[Plugin] = []  #: all loaded plugins
        self.named: list[Plugin] = []  #: the plugins of `plugins = [...]`
        self.observer_failures = 0
        self.listener: Callable[..., Any] | None = None  #: receives each event first
        self.modules: Sequence[str] = ()  #: as passed to `load`, so that another process can load the same
        self.root, self.allow_code = Path.cwd(), False
        self.tables: Mapping[str, Any] = {}  #: the tables of `[plugin]`, by name
        self.chosen: dict[tuple[str, str], tuple[Spec, Plugin]] = {}  #: by kind and name
        self._loader = _Loader(self)

    @classmethod
    def load(
        cls,
        names: Mapping[str, Collection[str]],
        modules: Sequence[str] = (),
        root: Path | None = None,
        allow_code: bool = False,
        tables: Mapping[str, Any] | None = None,
    ) -> PluginSet:
        """Import and check the plugins that a run uses, and no others.

        Args:
            names: used names by kind: ``{"train_engines": {"torch"}}``. ``"dist:name"`` picks a distribution.
            modules: the run file's ``plugins = [...]``: names of the group ``engine.plugins``, and paths ending in ``.py``.
            root: folder of the run file; default: the working directory.
            allow_code: run ``.py`` files outside ``root`` too.
            tables: ``[plugin]`` of the run file. A wrong table is left to ``validate``, which names its line.

        Raises:
            PluginProblems: all problems at once.
        """
        plugin_set = cls()
        plugin_set.modules, plugin_set.allow_code = tuple(modules), allow_code
        plugin_set.root, plugin_set.tables = root or plugin_set.root, tables or {}
        if problems := plugin_set._loader.load(names):
            raise PluginProblems(problems, plugin_set)
        return plugin_set

    def adopt(self, kind: str, name: str, spec: Spec, plugin: Plugin) -> None:
        """Add the spec of a plugin that is loaded in another Python environment; its module here has no hooks."""
        self.manager.register(plugin.module, plugin.module.__name__)
        self.plugins.append(plugin)
        self.chosen[kind, name] = spec, plugin

    def find(self, kind: str, name: str) -> Spec | None:
        """Return the spec of a name; None if the run does not use the name or its plugin failed to load."""
        return self.chosen[kind, name][0] if (kind, name) in self.chosen else None

    def offered(self, kind: str, name: str) -> Spec | None:
        """Return the spec of a name that no key of the run file chose; None if no plugin offers it.

        Its plugin is loaded now, if the run has not loaded it.

        Raises:
            PluginError: the plugin is broken, or two offer the name.
        """
        if (kind, name) not in self.chosen and self.offers(kind, name):
            self._load_later(kind, name)
        return self.find(kind, name)

    def offers(self, kind: str, name: str) -> bool:
        """Return whether an installed plugin or one of ``plugins = [...]`` offers a name, without importing it."""
        return any(find(kind, name)) or name in self.local_names(kind)

    def local_names(self, kind: str) -> set[str]:
        """Return the names of a kind that the plugins of ``plugins = [...]`` offer."""
        return {name for plugin in self.named for name in self._loader.table(plugin, kind)}

    def known(self, kind: str) -> set[str]:
        """Return the names that may have a table in a run file: of plugins here, and of those that this project publishes."""
        ours = {name for our_kind, name in our_plugins() if our_kind == kind}
        return {*known_names(kind), *self.local_names(kind), *ours}

    def require(self, kind: str, name: str) -> Any:
        """Resolve a name that no key of the run file chose, such as an objective or a part.

        Its plugin is loaded now, if the run has not loaded it.

        Raises:
            PluginError: no installed plugin offers the name, or its plugin is broken. The set is unchanged.
        """
        if (kind, name) not in self.chosen:
            self._load_later(kind, name)
        return self.resolve(kind, name)

    def _load_later(self, kind: str, name: str) -> None:
        if problems := self._loader.load({kind: [name]}):
            raise PluginProblems(problems, self)

    def spec(self, kind: str, name: str) -> Spec:
        """Return the spec of a name that this run uses.

        Raises:
            PluginError: the run does not use the name.
        """
        if spec := self.find(kind, name):
            return spec
        raise PluginError(
            f"{nouns()[kind].capitalize()} '{name}' is not loaded: the run file does not name it."
        )

    def resolve(self, kind: str, name: str) -> Any:
        """Import and return the class or function of a name; an engine's capabilities are checked."""
        spec = self.spec(kind, name)
        label = self.chosen[kind, name][1].label
        found = import_load(label, spec.load) if isinstance(spec.load, str) else spec.load
        if kind in CONTRACTS:
            check_engine(label, spec, found)
        return found

    def function(self, kind: str, name: str) -> Callable[..., Any]:
        """Return ``resolve`` of a function, or of a class that is made with its options, wrapped by ``guarded``.

        Raises:
            PluginError: the function cannot be called with the arguments of its kind and its options.
        """
        spec, plugin = self.chosen[kind, name]
        found: Callable[..., Any] = self.resolve(kind, name)
        check_signature(f"{plugin.label}: {spec.noun} '{name}'", spec, found)
        return self.guarded(kind, name, found)

    def guarded(self, kind: str, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``found`` so that its exceptions name the plugin that offers ``name`` and the plugin's version.

        Exceptions of the core's functions are not wrapped: they are bugs of the engine.

        Raises:
            PluginError: raised by the wrapped function if ``found`` fails.
        """
        spec, plugin = self.chosen[kind, name]

        def called(*arguments: Any, **options: Any) -> Any:
            """Call ``found`` and raise its failure as a PluginError."""
            with self.naming(plugin, f"{plugin.label}: {spec.noun} '{name}' failed"):
                return found(*arguments, **options)

        return found if plugin.source == CORE else called

    def overrides(self, hook: str, plugins: Sequence[Plugin] | None = None) -> bool:
        """Return whether one of some plugins implements a step hook; default: a plugin of this run."""
        return any(hasattr(plugin.module, hook) for plugin in (self.plugins if plugins is None else plugins))

    def step(self, role: str, *backends: tuple[str, str]) -> SimpleNamespace:
        """Return the step hooks for one role.

        Args:
            role: the role's name, for messages.
            backends: ``(kind, name)`` of the role's backend, whose plugin is called last; plugins of
                other roles' backends are not called. For a sampler: its backend, then the actor's.

        Returns:
            The step hooks by name, as functions of keyword arguments. Each returns the first answer,
            or None if the default applies. An optional positional argument is a function that
            returns the problem of an answer, or ""; an answer with a problem is refused with an
            error that names the plugin.
        """
        asked = self.asked(*backends)
        return SimpleNamespace(**{hook: partial(self._first, asked, role, hook) for hook in STEP_HOOKS})

    def asked(self, *backends: tuple[str, str]) -> list[Plugin]:
        """Return the plugins that ``step`` calls, in order."""
        for backend in backends:
            self.spec(*backend)
        return list(dict.fromkeys([*self.named[::-1], *(self.chosen[backend][1] for backend in backends)]))

    def emit(self, event: str, step: int, data: Mapping[str, Any]) -> list[str]:
        """Call every observer and return the answers after their plugins' labels. A failure is logged and counted, not raised."""
        if self.listener:
            self.listener(event, step, data)
        answers = []
        for plugin in reversed(self.plugins):
            try:
                answer = self._caller("engine_on_event", plugin)(
                    event=event, step=step, data=dict(data), plugin_options=plugin.options
                )
                if bad := [each for each in answer if not isinstance(each, str)]:
                    raise TypeError(f"engine_on_event must return text or None; it gave {bad[0]!r}")
                answers += [f"{plugin.label}: {each}" for each in answer]
            except (Exception, SystemExit):
                self.observer_failures += 1
                log.exception(
                    "%s failed to observe '%s' of step %d; training continues", plugin.label, event, step
                )
        return answers

    def versions(self) -> dict[str, str]:
        """Return the versions of the core and of each distribution in use; a one-file plugin has its hash."""
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
        """Call a hook of one plugin.

        Raises:
            PluginError: the hook failed; the message names the plugin and its version.
        """
        with self.naming(plugin, f"{plugin.label} failed in {hook} ({asker})"):
            return self._caller(hook, plugin)(**arguments, plugin_options=plugin.options)

    @contextlib.contextmanager
    def naming(self, plugin: Plugin, failure: str) -> Iterator[None]:
        """Turn an error of a plugin into a PluginError that begins with ``failure``; errors of the engine get a note.

        Raises:
            PluginError: the plugin failed.
        """
        try:
            yield
        except EngineError as exc:
            exc.add_note(f"{failure}.")
            raise
        except (Exception, SystemExit) as exc:
            raise PluginError(f"{failure}: {describe(exc, plugin.module.__name__)}") from exc


class _Loader:
    """The loader of one ``PluginSet``; it continues after a problem, so that all problems are found."""

    def __init__(self, plugin_set: PluginSet) -> None:
        self.plugin_set = plugin_set
        self.problems: list[tuple[str, str, str]] = []
        # by module; None: the import failed in this call and was reported
        self.imported: dict[str, Plugin | None] = {}
        self.started = False

    def load(self, names: Mapping[str, Collection[str]]) -> list[tuple[str, str, str]]:
        """Load the plugins of names and return all problems; the first call also loads ``plugins = [...]``.

        A later call does not read the files of ``plugins = [...]`` again, so an edit during a run has no effect. It
        reports an earlier failure again if it needs the same plugin.
        """
        self.problems = []
        self.imported = {module: plugin for module, plugin in self.imported.items() if plugin is not None}
        named = [] if self.started else [self._named(entry) for entry in self.plugin_set.modules]
        self.started = True
        self.plugin_set.named += dict.fromkeys(plugin for plugin in named if plugin is not None)
        for kind, of_kind in names.items():
            for name in sorted(of_kind):
                self._choose(kind, name)
        # observers: named first
        self.plugin_set.plugins.sort(key=lambda plugin: plugin in self.plugin_set.named)
        return list(dict.fromkeys(self.problems))

    @contextlib.contextmanager
    def _collecting(self, kind: str, name: str) -> Iterator[None]:
        try:
            yield
        except PluginError as exc:
            self.problems.append((kind, name, str(exc)))

    def _named(self, entry: str) -> Plugin | None:
        """Load the plugin of an entry of ``plugins = [...]`` with its options; None if that failed."""
        plugin = self._imported(entry)
        if plugin is not None:
            with self._collecting("plugins", entry):
                model = self._option_model(plugin)
                self.plugin_set.chosen["plugins", entry] = _PluginOptions(load=model, config=model), plugin
                table = self.plugin_set.tables.get(Path(split(entry)[1]).stem, {})
                with contextlib.suppress(ValidationError):  # `validate` reports it with its line
                    plugin.options = model.model_validate(table, context={"folder": self.plugin_set.root})
        return plugin

    def _option_model(self, plugin: Plugin) -> type[BaseModel]:
        """Return what a plugin's ``engine_options`` returns, else the model without keys.

        Raises:
            PluginError: the hook failed, or returned something else.
        """
        hook = "engine_options"
        if not hasattr(plugin.module, hook):
            return NoOptions
        with self.plugin_set.naming(plugin, f"{plugin.label} failed in {hook} (while it was loaded)"):
            model = getattr(plugin.module, hook)()
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError(
                f"{plugin.label}: {hook} must return a class derived from Options; it gave {model!r}."
            )
        return model

    def _imported(self, entry: str) -> Plugin | None:
        """Import the plugin of an entry; None if that failed."""
        if not entry.endswith(".py"):
            if not any(find("plugins", entry)):
                self.problems.append(("plugins", entry, unknown_name("plugins", entry)))
            return self._behind("plugins", entry)
        with self._collecting("plugins", entry):
            module, digest = import_file(entry, self.plugin_set.root, self.plugin_set.allow_code)
            plugin = Plugin(module, f"Plugin file '{entry}' ({digest})", Path(entry).name, digest)
            return self._registered("plugins", entry, plugin)
        return None

    def _behind(self, kind: str, name: str) -> Plugin | None:
        """Import the plugin whose metadata offers a name; None if there is none or it failed."""
        offers = list(find(kind, name))
        if len(offers) > 1:
            self._ambiguous(kind, name, [str(offer.distribution) for offer in offers])
        if len(offers) != 1:
            return None
        (offer,) = offers
        if offer.module not in self.imported:
            self.imported[offer.module] = None
            with self._collecting(kind, name):
                source, version = offer.distribution.name, offer.distribution.version
                plugin = Plugin(import_offer(offer), str(offer), source, version)
                self._registered(kind, name, plugin)
        return self.imported[offer.module]

    def _registered(self, kind: str, name: str, plugin: Plugin) -> Plugin | None:
        """Check the hooks of a plugin and register it; return None if a hook is wrong.

        Raises:
            PluginError: the plugin that defines the table of a hook is broken.
        """
        plugin_set, module = self.plugin_set, plugin.module
        if known := self.imported.get(module.__name__):  # named twice
            return known
        if wrong := list(hook_problems(plugin_set.manager, module, plugin.label)):
            self.problems += [(kind, name, problem) for problem in wrong]
            return None
        plugin_set.manager.register(module, module.__name__)
        plugin_set.plugins.append(plugin)
        self.imported[module.__name__] = plugin
        return plugin

    def _ambiguous(self, kind: str, name: str, sources: Sequence[str]) -> None:
        choices = " or ".join(f"'{source.split(' ')[0]}:{split(name)[1]}'" for source in sources)
        offered = f"{nouns()[kind].capitalize()} '{name}' is offered by {' and by '.join(sources)}"
        self.problems.append((kind, name, f"{offered}. Write {choices}."))

    def table(self, plugin: Plugin, kind: str) -> dict[str, Spec]:
        """Return one table of a plugin; empty if it has none, or a wrong one, which is reported."""
        if kind not in plugin.tables:
            with self._collecting(kind, plugin.label):
                plugin.tables[kind] = self._table(plugin, kind)
        return plugin.tables.get(kind, {})

    def _table(self, plugin: Plugin, kind: str) -> dict[str, Spec]:
        """Collect one table of a plugin.

        Raises:
            PluginError: the table is malformed or lacks a name of the plugin's metadata.
        """
        hook = f"engine_{kind}"
        table: dict[str, Spec] = {}
        if hasattr(plugin.module, hook):
            with self.plugin_set.naming(plugin, f"{plugin.label} failed in {hook} (while it was loaded)"):
                table = getattr(plugin.module, hook)()
            check_table(plugin.label, kind, table)
        here = (kind, plugin.source, plugin.module.__name__)
        for offer in installed():
            if (offer.kind, offer.distribution.name, offer.module) == here and offer.name not in table:
                held = ", ".join(sorted(table)) or "nothing"
                raise PluginError(
                    f"{plugin.label} promises the {nouns()[kind]} '{offer.name}' in its metadata, but {hook} of "
                    f"'{offer.module}' gives {held}. The entry point and the table must agree."
                )
        return table

    def _choose(self, kind: str, name: str) -> None:
        """Bind a used name to the one plugin that offers it."""
        distribution, short = split(name)
        found = self._behind(kind, name)
        if found is None and any(find(kind, name)):
            return  # already reported
        candidates = [] if found is None else [found]
        named = [plugin for plugin in self.plugin_set.named if plugin not in candidates]
        fitting = [plugin for plugin in named if distribution in (None, plugin.source)]
        candidates += [plugin for plugin in fitting if short in self.table(plugin, kind)]
        if len(candidates) > 1:
            self._ambiguous(kind, name, [f"{plugin.source} {plugin.version}" for plugin in candidates])
        elif not candidates:
            also = {other for plugin in named for other in self.table(plugin, kind)}
            self.problems.append((kind, name, unknown_name(kind, name, also)))
        elif spec := self.table(candidates[0], kind).get(short):  # else: its table failed and was reported
            self.plugin_set.chosen[kind, name] = spec, candidates[0]
            # other objects are checked where they are used
            if spec.given and not spec.internal and not isinstance(spec.load, str | type):
                with self._collecting(kind, name):
                    self.plugin_set.function(kind, name)
