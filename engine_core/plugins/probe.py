"""Load the names of installed plugins in the subprocess of ``engine plugins --check``, and print what is wrong with each."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence

from engine_core.errors import EngineError
from engine_core.plugins.metadata import TABLES, split
from engine_core.plugins.modules import table_module
from engine_core.plugins.plugin_set import PluginSet
from engine_core.specs import Spec, resolve


def probe(targets: Sequence[str]) -> None:
    """Load each name and print its problem and what it says of the machine, a line of JSON for each name.

    Each line is written at once: the next name may end the process. What plugins print goes to stderr.

    Args:
        targets: ``kind=distribution:name`` each.
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
                elif kind == TABLES:
                    table_module(split(name)[1])
                else:
                    plugins = PluginSet.load({kind: [name]})
                    spec = plugins.spec(kind, name)
                    if spec.load:  # a column that a role's `infer` gives has none
                        plugins.resolve(kind, name)
                    health = _health(spec)
            except EngineError as exc:
                problem = str(exc)
            print(json.dumps([target, problem, *health]), file=told)


def _health(spec: Spec) -> tuple[str, bool]:
    """Return what a spec says of this machine, and whether that is well."""
    if spec.health is None:
        return "", True
    try:
        return resolve(spec.health)(), True
    except EngineError as exc:
        return str(exc), False
