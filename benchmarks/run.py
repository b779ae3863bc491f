"""Run the benchmarks, one after another, each in a process of its own.

    python benchmarks/run.py            # all
    python benchmarks/run.py --list     # their names and what they measure
    python benchmarks/run.py hf_rollout # these

A benchmark is a script ``benchmarks/<name>/compare.py`` that needs no arguments and ends within minutes.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, Path]:
    """Scripts by name."""
    return {path.parent.name: path for path in sorted(FOLDER.glob("*/compare.py"))}


def purpose(script: Path) -> str:
    """The first line of its docstring."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def main() -> int:
    known = benchmarks()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of: {', '.join(known)}; none: all")
    parser.add_argument("--list", action="store_true", help="say what there is and run nothing")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"unknown benchmark '{unknown[0]}'. Known: {', '.join(known)}.")
    if arguments.list:
        for name, script in known.items():
            print(f"{name:16} {purpose(script)}")
        return 0
    failed = []
    for name in arguments.names or known:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, str(known[name])]).returncode:
            failed.append(name)
    if failed:
        print(f"Failed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
