"""The tables of worlds: ``[environment.gymnasium]`` and ``[data.gymnasium]``, and those of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from engine_core.specs import FilePath, Options, OutputPath


def _from_folder(python: str, info: ValidationInfo) -> str:
    folder = (info.context or {}).get("folder")  # links are kept: that of a venv matters
    return str(Path(folder).absolute() / python) if folder and "/" in python else python


class WorldOptions(Options):
    """The keys that all worlds have."""

    python: Annotated[str, AfterValidator(_from_folder)] = ""
    """Python interpreter of another environment that has the world's library; it needs no package of Engine. Empty: the interpreter of the run. A relative path starts at the folder of the run file."""
    variables: list[str] = []
    """Environment variables that the world receives, by name, in addition to ``PATH``, ``HOME`` and ``USER``, such as ``HF_HOME``. Programs that a world runs for the policy can read them."""


class EpisodeOptions(Options):
    """The keys of environments."""

    processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Number of processes for the episodes. A slow step delays the other episodes of its process."""


class StepOptions(EpisodeOptions):
    """The keys of worlds that answer an action of the policy with an observation."""

    action_tag: str = ""
    """Tag of the action in a turn: ``action`` for ``<action>...</action>``. Empty: the whole turn is the action."""


class RowsOptions(Options):
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
    register_file: FilePath | None = None
    """Python file that registers the environment; relative to the folder of the run file."""


class GymnasiumOptions(GymnasiumWorld, StepOptions):
    """``[environment.gymnasium]``: an environment of Gymnasium with actions of ``Text`` or ``Discrete``. Needs ``pip install 'engine-plugin-agents[gymnasium]'`` where `python` runs."""


class GymnasiumRows(GymnasiumWorld, RowsOptions):
    """``[data.gymnasium]``: rows whose prompt is the first observation of a seed."""


class OpenEnvWorld(WorldOptions):
    """The keys that name an environment of OpenEnv."""

    url: str
    """Address of the environment's server, such as ``http://127.0.0.1:8000``. It must allow as many sessions as episodes run at the same time."""
    action: str = "message"
    """Key of the action that holds the policy's text."""
    observation: str = ""
    """Key of the observation that the policy sees. Empty: the whole observation as JSON."""
    arguments: dict[str, Any] = {}
    """Further keys of each action."""


class OpenEnvOptions(OpenEnvWorld, StepOptions):
    """``[environment.openenv]``: an environment of OpenEnv, which a server runs. Needs ``pip install 'engine-plugin-agents[openenv]'`` where `python` runs."""


class OpenEnvRows(OpenEnvWorld, RowsOptions):
    """``[data.openenv]``: rows whose prompt is the first observation of a seed."""


class VerifiersWorld(WorldOptions):
    """The keys that name an environment of verifiers."""

    taskset: str
    """Id of the taskset: an installed package, or a module in `folder`."""
    settings: dict[str, Any] = {}
    """Other keys of the environment's config, such as ``{ agent = { harness = { id = "null" } } }``. The runtime of the agent is ``subprocess`` unless this names another one."""
    folder: OutputPath | None = None
    """Folder with modules of tasksets and harnesses, in addition to those that are installed; relative to the folder of the run file."""


class VerifiersOptions(VerifiersWorld, EpisodeOptions):
    """``[environment.verifiers]``: an environment of verifiers 0.4, whose agents talk to the policy endpoint. Needs ``pip install 'engine-plugin-agents[verifiers]'`` where `python` runs."""


class VerifiersRows(VerifiersWorld, RowsOptions):
    """``[data.verifiers]``: the tasks of a taskset."""
