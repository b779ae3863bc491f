"""The tables of worlds: ``[environment.gymnasium]`` and ``[data.gymnasium]``, and those of other libraries."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from engine_core.specs import FilePath, Options


class WorldOptions(Options):
    """The keys that all worlds have."""

    python: str = ""
    """Python interpreter of another environment that has the world's library; it needs no package of Engine. Empty: the interpreter of the run."""


class StepOptions(WorldOptions):
    """The keys of worlds that answer an action of the policy with an observation."""

    processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Number of processes for the episodes. A slow step delays the other episodes of its process."""
    action_tag: str = ""
    """Tag of the action in a turn: ``action`` for ``<action>...</action>``. Empty: the whole turn is the action."""


class RowsOptions(WorldOptions):
    """The keys of data sources that a world gives."""

    count: Annotated[int, Field(ge=1)] = 256
    """Number of rows to train on."""
    held_out: Annotated[int, Field(ge=0)] = 32
    """Number of held-out rows."""


class GymnasiumWorld(WorldOptions):
    """The keys that name an environment of Gymnasium."""

    id: str
    """Id of the environment, as in ``gymnasium.make``. ``module:Id`` imports a module first."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of ``gymnasium.make``. With ``render_mode = "ansi"`` the rendered text is the observation."""
    register_file: FilePath = ""
    """Python file that registers the environment; relative to the folder of the run file."""


class GymnasiumOptions(GymnasiumWorld, StepOptions):
    """``[environment.gymnasium]``: an environment of Gymnasium with actions of ``Text`` or ``Discrete``. Needs ``pip install 'engine-plugin-agents[gymnasium]'`` where `python` runs."""


class GymnasiumRows(GymnasiumWorld, RowsOptions):
    """``[data.gymnasium]``: rows whose prompt is the first observation of a seed."""
