"""The option ``--step`` of commands, which names a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

Step = Annotated[
    int | None, typer.Option("--step", metavar="N", help="The checkpoint of this step; default: the newest.")
]
