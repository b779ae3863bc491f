"""The base of all suites: contracts become tests, and workers are started once for a class.

Imports no torch beyond what the contracts' modules import: the tests run in the workers.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from engine_core.errors import ConfigError, EngineError, did_you_mean
from engine_core.plugins.metadata import known_names, split
from engine_core.plugins.plugin_set import PluginSet
from engine_plugin_testing.contracts import Contract, contracts_of
from engine_plugin_testing.devices import asked_accelerator, lacking
from engine_plugin_testing.launcher import CaseFailed, Workers
from engine_plugin_testing.option_tables import check_table

UNSUPPORTED = "unsupported: "
UNDECLARED = " does not declare the capability "
EMPTY = "` of the suite is empty"
NOWHERE_ELSE = "`resumes_on` of this suite names no other number of ranks"
"""Reasons of skips, by which a record of outcomes tells them apart."""


class Suite:
    """The base of the suites. Attributes of a subclass say what is tested and where.

    Attributes:
        plugins: as in a run file: names of the group ``engine.plugins``, and ``.py`` files relative to
            the folder of the test's file.
        plugin_options: options of ``plugins``, the tables ``[plugin.NAME]`` by name: ``{"frozen_head": {"freeze": False}}``.
        unsupported: contracts that this plugin does not keep, with the reason: ``{"test_x": "reason"}``.
        world_size: ranks.
        resumes_on: other numbers of ranks that must load what ``world_size`` ranks saved; none: not tested.
        worker_context: ``module:function`` or ``file.py:function``, a context manager called with
            ``rank`` and ``world_size`` that each worker enters once, before anything is built.
        process_group: backend of ``torch.distributed``, where ``world_size`` is over 1.
        env: environment variables of the workers.
        deadline: seconds of one contract.
    """

    kind: ClassVar[str] = ""  # the table hook: train_engines, rollout_engines, rewards
    section: ClassVar[str] = ""  # the table of a run file that chooses it
    bench: ClassVar[str] = ""  # module:class of the bench that contracts receive
    fields: ClassVar[tuple[str, ...]] = ()  # attributes that are sent to the workers
    contracts: ClassVar[Mapping[str, Contract]] = {}

    plugins: Sequence[str] = ()
    plugin_options: Mapping[str, Mapping[str, Any]] = {}
    unsupported: Mapping[str, str] = {}
    world_size: int = 1
    resumes_on: Sequence[int] = ()
    worker_context: str = ""
    process_group: str = "gloo"
    env: Mapping[str, str] = {}
    deadline: float = 120.0

    _workers: ClassVar[Workers | None] = None
    _others: ClassVar[dict[int, Workers]] = {}  # by number of ranks, of `resumes_on`
    _problem: ClassVar[str] = ""  # why nothing can be tested: fails one test and skips the others
    _told: ClassVar[bool] = False
    _capabilities: ClassVar[frozenset[str]] = frozenset()
    _sampling: ClassVar[frozenset[str]] = frozenset()
    _fields: ClassVar[frozenset[str]] = frozenset()  # of the plugin's option model

    def __init_subclass__(cls, modules: Sequence[ModuleType] = (), **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if modules:
            cls.contracts = {made.name: made for made in contracts_of(*modules)}
            for made in cls.contracts.values():
                setattr(cls, made.name, _test_of(made))
        elif cls.contracts:
            cls._check_attributes()
        for name, reason in cls.unsupported.items():
            if not callable(getattr(cls, name, None)) or not name.startswith("test_"):
                known = [known for known in dir(cls) if known.startswith("test_")]
                match = did_you_mean(name, known).split(" Known:")[0]
                raise TypeError(f"{cls.__name__}.unsupported names '{name}', which is no test of it.{match}")
            if not (isinstance(reason, str) and reason.strip()):
                raise TypeError(
                    f"{cls.__name__}.unsupported['{name}'] must be the reason, as text; it is {reason!r}."
                )

    @classmethod
    def _check_attributes(cls) -> None:
        """Raise TypeError for a value that the suite does not read, such as ``option``, and for a function as a value."""
        known = [name for base in cls.__mro__[1:] for name in vars(base) if not name.startswith("_")]
        for name, value in vars(cls).items():
            if name in cls.fields and callable(value):
                address = f"'FILE.py:{value.__name__}'"
                raise TypeError(f"{cls.__name__}.{name} is a function. Name it as text, {address}.")
            if (
                name.startswith(("_", "pytest"))
                or name in known
                or callable(value)
                or hasattr(value, "__get__")
            ):
                continue
            match = difflib.get_close_matches(name, known, n=1, cutoff=0.82)
            hint = f"Did you mean '{match[0]}'? " if match else ""
            raise TypeError(
                f"{cls.__name__}.{name} is no attribute that this suite reads. {hint}"
                f"If it is your own, name it '_{name}'."
            )

    @classmethod
    def setup_class(cls) -> None:
        """Check the plugin and its options, and prepare the workers; a problem is kept, and each test raises it."""
        cls._problem, cls._told = "", False
        try:
            plugins = PluginSet.load({cls.kind: {cls.offered()}}, cls.plugins, cls.root())
            tables = {Path(split(entry)[1]).stem: plugins.spec("plugins", entry) for entry in cls.plugins}
            for name, table in cls.plugin_options.items():
                if name not in tables:
                    raise ConfigError(f"`plugin_options` has '{name}'.{did_you_mean(name, tables)}")
                check_table(tables[name], ("plugin", name), table, cls.root())
            spec = plugins.spec(cls.kind, cls.offered())
            check_table(spec, cls.table(), cls.settings().get("options", {}), cls.root())
        except EngineError as error:
            cls._problem = f"{error}{cls._hint()}"
            return
        cls._capabilities = getattr(spec, "capabilities", frozenset())
        cls._sampling = getattr(spec, "sampling", frozenset())
        cls._fields = frozenset(spec.config.model_fields)
        cls._workers, cls._others = cls._group(cls.world_size), {}

    @classmethod
    def _group(cls, size: int) -> Workers:
        return Workers(
            size, cls.worker_context, cls.root(), cls.process_group, cls.env, cls.deadline, cls.accelerator()
        )

    @classmethod
    def accelerator(cls) -> str:
        """Return the device type that ``ENGINE_TEST_DEVICE`` gives the ranks; empty if the class decides."""
        return asked_accelerator() if getattr(cls, "device", None) == "" else ""

    @classmethod
    def teardown_class(cls) -> None:
        """End the workers."""
        if cls._workers is not None:
            for workers in (cls._workers, *cls._others.values()):
                workers.close()
            cls._workers = None

    @classmethod
    def offered(cls) -> str:
        """Return the name under test."""
        return str(getattr(cls, "backend", ""))

    @classmethod
    def table(cls) -> tuple[str, ...]:
        """Return the path of the plugin's options in a run file: ``("actor", "fast")``."""
        return (cls.section, split(cls.offered())[1])

    @classmethod
    def _hint(cls) -> str:
        """Return what to do about a name that no installed plugin offers."""
        if cls.plugins or split(cls.offered())[1] in known_names(cls.kind):
            return ""
        return "\nInstall the package that offers it (pip install -e .), or give its file: plugins = ['NAME.py']."

    @classmethod
    def root(cls) -> Path:
        """Return the folder of the test's file."""
        return Path(inspect.getfile(cls)).parent.resolve()

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Return the values that are sent to the workers, as JSON values."""
        fields = ("plugin_options", *cls.fields)
        made = {"root": str(cls.root()), **{name: plain(getattr(cls, name)) for name in fields}}
        if kind := cls.accelerator():
            made["device"] = kind
            if further := plain(getattr(cls, "on_accelerator", {})):
                made["options"] = {**further, **made["options"]}
        return made

    def check(self, made: Contract) -> None:
        """Run one contract, or skip it with its reason."""
        __tracebackhide__ = True
        if reason := self.unsupported.get(made.name):
            pytest.skip(f"{UNSUPPORTED}{reason}")
        if self._problem:
            self._report_problem()
        if made.capability and made.capability not in self._capabilities:
            pytest.skip(f"the spec of '{self.offered()}'{UNDECLARED}'{made.capability}'")
        if made.options and not made.options & self._sampling:
            names = " and ".join(f"'{name}'" for name in sorted(made.options))
            pytest.skip(f"the spec of '{self.offered()}' lacks {names} in `sampling`")
        if made.role and made.role not in getattr(self, "roles", ()):
            pytest.skip(f"`roles` of the suite lacks '{made.role}'")
        if made.option and made.option not in self._fields:
            pytest.skip(f"the options of '{self.offered()}' lack '{made.option}'")
        if made.setting and not getattr(self, made.setting):
            pytest.skip(f"`{made.setting}{EMPTY}")
        if made.package and importlib.util.find_spec(made.package) is None:
            pytest.skip(f"it needs the package {made.package}, which is not installed")
        if made.follow and not self.resumes_on:
            pytest.skip(NOWHERE_ELSE)
        most = max(self.world_size, *(self.resumes_on if made.follow else ()), 0)
        if (kind := self.accelerator()) and (reason := lacking(kind, most)):
            pytest.skip(reason)
        if failure := self._failure(made):
            pytest.fail(f"{made.promise}\n\n{failure}", pytrace=False)

    def _report_problem(self) -> None:
        """Fail the first test with ``_problem`` and skip the others."""
        __tracebackhide__ = True
        if self._told:
            pytest.skip("nothing can be tested; see the failure of this class")
        type(self)._told = True
        pytest.fail(self._problem, pytrace=False)

    def _failure(self, made: Contract) -> str:
        assert self._workers is not None
        with tempfile.TemporaryDirectory(prefix="engine-conformance-") as shared:
            settings = {**self.settings(), "shared": shared}
            try:
                self._workers.run(self.bench, made.case, settings)
                for size in self.resumes_on if made.follow else ():
                    self._others.setdefault(size, self._group(size))
                    self._others[size].run(self.bench, made.follow_case, settings)
            except CaseFailed as failure:
                return str(failure)
        return ""


def _test_of(made: Contract) -> Any:
    def test(self: Suite) -> None:
        """Run the contract."""
        self.check(made)  # in sight of pytest, which reports this place for a skip

    test.__name__, test.__doc__ = made.name, made.promise
    test.__qualname__ = made.name
    return test


def plain(value: Any) -> Any:
    """Convert tuples and mappings to JSON values."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
