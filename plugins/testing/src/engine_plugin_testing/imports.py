"""The contract that every plugin keeps: importing the module with its hooks is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from engine_plugin_testing.contracts import contract

HEAVY = ("torch", "transformers", "numpy", "datasets", "tokenizers")
PROGRAM = """
import json, sys
from pathlib import Path
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
import engine_core.plugins.plugin_set as plugins
before = set(sys.modules)
plugins.PluginSet.load({order["kind"]: [order["name"]]}, order["modules"], Path(order["root"]))
print(json.dumps(sorted(set(order["heavy"]) & (set(sys.modules) - before))))
"""


@contract(catches=("torch imported at the top of the hook module",))
def hooks_load_without_heavy_imports(bench: Any) -> None:
    """Loading the plugin's hooks and tables imports no torch, transformers or numpy."""
    if bench.place.rank:  # a fresh interpreter is the same for every rank
        return
    order = {
        "kind": bench.kind,
        "name": bench.name,
        "modules": list(bench.settings["plugins"]),
        "root": bench.settings["root"],
        "path": sys.path,
        "heavy": HEAVY,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(order)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"The plugin does not load in a fresh interpreter:\n{done.stderr[-2000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found, (
        f"Loading the hooks of '{bench.name}' imports {', '.join(found)}; import them where used."
    )
