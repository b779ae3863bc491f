"""Option tables of the trackers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine_core.specs import Options


class DetailOptions(Options):
    """What a tracker shows in addition to the metrics."""

    details_every_steps: Annotated[int, Field(ge=0)] = 10
    """Steps between completions and histograms of reward, response length and advantage; 0: none."""
    completions: Annotated[int, Field(ge=0)] = 8
    """Responses in a table of completions, the first ones of the step."""


class TensorBoardOptions(DetailOptions):
    """``[tracking.tensorboard]``: event files of TensorBoard. Needs ``pip install 'engine-plugin-tools[tensorboard]'``."""

    folder: str = "tensorboard"
    """Folder of the event files, next to the run folders (below ``run.dir``), with a folder for each run."""


class ArtifactOptions(DetailOptions):
    """What a tracker with a store keeps at the end of a run."""

    artifacts: list[str] = ["config.resolved.toml", "env.json", "report.html"]
    """Files below the run folder, as patterns such as ``checkpoints/*/model.safetensors``. Those that exist are stored."""


class WandbOptions(ArtifactOptions):
    """``[tracking.wandb]``: a run in Weights & Biases. Needs ``pip install 'engine-plugin-tools[wandb]'``."""

    project: str = "engine"
    """Project name."""
    entity: str | None = None
    """Team or user; default: the logged-in user's default entity."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """``online``: send metrics at once. ``offline``: keep metrics in the run folder for ``wandb sync``. ``disabled``: drop metrics."""


class TrackioOptions(ArtifactOptions):
    """``[tracking.trackio]``: a local trackio dashboard. Needs ``pip install 'engine-plugin-tools[trackio]'``."""

    project: str = "engine"
    """Project name: ``trackio show --project engine`` shows it."""


class MlflowOptions(ArtifactOptions):
    """``[tracking.mlflow]``: a run in MLflow. Needs ``pip install 'engine-plugin-tools[mlflow]'``."""

    uri: str = "sqlite:///mlflow.db"
    """Tracking store: a database, or the address of a server."""
    experiment: str = "engine"
    """Experiment name; created if it does not exist."""


class PrometheusOptions(Options):
    """``[tracking.prometheus]``: metrics of the newest step over HTTP. Needs ``pip install 'engine-plugin-tools[prometheus]'``."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port on 127.0.0.1; 0: any free one, which the log names."""
