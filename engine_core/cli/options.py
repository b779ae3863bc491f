"""Arguments and options that several commands share, as annotations: ``def mine(run: Run, step: Step = None)``.

``File``: a run file. ``Files``: several. ``Run``: a run folder, its name below ``runs/``, or ``latest``. ``Sets``: ``--set``.
``AllowCode``: ``--allow-code``. ``Json``: ``--json``. ``Step``: ``--step``, a number or ``best``.
"""

from __future__ import annotations

from typing import Annotated

import typer

File = Annotated[str, typer.Argument(metavar="FILE", help="Run file (TOML).")]
Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", help="Run files (TOML); a later one wins over an earlier one."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one key: --set actor.optim.lr=1e-6; may be repeated. A path is relative to the working directory; "
        "one in plugins, or in a plugin's table, is relative to the run file.",
    ),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Allow the run file to name Python files outside its folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="N|best", help="The checkpoint of this step; default: the newest."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, its name below runs/, or 'latest'.")]
