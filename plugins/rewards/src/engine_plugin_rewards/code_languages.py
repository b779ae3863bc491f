"""A language of programs, and the one that comes with this plugin.

Another language is a name of the table hook ``engine_code_languages``, whose ``load`` is a function that
returns a ``Language``::

    def shell():
        return Language(
            fences={"sh", "bash"}, file="main.sh", run=("/bin/sh", "main.sh"), shows=("/bin", "/usr/bin")
        )


    @hookimpl
    def engine_code_languages():
        return {"shell": CodeLanguage(load=shell)}
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Language:
    """A language: how its programs are found in a response and run.

    Args:
        fences: words after the three backticks of its blocks, in lower case.
        file: name of the source in the program's folder. None: Python, which needs no file.
        build: command before ``run``, the first word an absolute path; needs `max_processes` above 1.
        run: command, the first word an absolute path.
        shows: files and folders to read in addition to the system's libraries; for a link, the folder that contains
            it.

    A language with a ``file`` has tests of stdin and stdout alone, and needs the tier ``namespaces``, in which a
    program has a writable folder.
    """

    fences: Collection[str]
    file: str | None = None
    build: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of tests that its programs can run."""
        if self.file is None:
            return frozenset({"stdin", "call", "expression", "assert"})
        return frozenset({"stdin"})


def python() -> Language:
    """Return Python, in the version that runs the engine, with its standard library."""
    return Language(fences={"python", "python3", "py"})
