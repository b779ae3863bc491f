"""The subprocess of ``engine plugins --check``, which loads the names of plugins and prints their problems."""

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
    """Load each name and print its problem and its health check's result, one line of JSON per name.

    Each line is written at once: the next name may end the process. Output of plugins goes to stderr.

    Args:
        targets: names as ``kind=distribution:name``.
    """
    gc.disable()  # garbage collection takes a fifth of the import time in this short process
    with os.fdopen(os.dup(1), "w", buffering=1) as output:
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
                    if spec.load:  # a column that is an output of a role's `infer` has none
                        plugins.resolve(kind, name)
                    health = _health(spec)
            except EngineError as exc:
                problem = str(exc)
            print(json.dumps([target, problem, *health]), file=output)


def _health(spec: Spec) -> tuple[str, bool]:
    """Run a spec's health check; return its text and whether it passed."""
    if spec.health is None:
        return "", True
    try:
        return resolve(spec.health)(), True
    except EngineError as exc:
        return str(exc), False
