"""Specs that need no installation: the core's own, and a few strangers'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import Field, field_validator

from engine_core import builtin
from engine_core.config.read import read_config
from engine_core.config.validate import validate
from engine_core.specs import (
    Advantage,
    Column,
    Curriculum,
    DataSource,
    Loss,
    NoOptions,
    Options,
    Reward,
    RolloutBackend,
    Stage,
    TrainBackend,
)
from engine_plugin_processes import plugin as processes
from engine_plugin_tools import plugin as tools
from engine_plugin_torch import plugin as torch_plugin
from engine_plugin_trainers import plugin as trainers

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig


class FormatOptions(Options):
    """[reward.format]"""

    pattern: str
    """Regular expression."""
    share: float = Field(1.0, gt=0, le=1)
    """Part of the reward."""

    @field_validator("pattern")
    @classmethod
    def _closed(cls, value: str) -> str:
        if value.count("(") != value.count(")"):
            raise ValueError("a bracket is not closed.")
        return value


class Inner(Options):
    """A table in a table."""

    low: int = 1
    high: int = 2


class FSDPOptions(Options):
    """[actor.fsdp]"""

    sharding: Literal["full", "none"] = "full"
    inner: Inner = Inner()


class SquaresOptions(Options):
    """[data.squares]"""

    count: int = Field(8, gt=0)
    """Rows of a split."""


class RisingOptions(Options):
    """[data.rising]"""

    column: str = "level"
    """Column of the difficulty."""


class SharedOptions(Options):
    """An advantage's part of [algorithm.twin]."""

    alpha: float = 0.5


class SharedLossOptions(Options):
    """A loss's part of [algorithm.twin]."""

    beta: float = 0.1


def load() -> None:
    """Never called."""


SPECS: dict[str, dict[str, Any]] = {
    "trainers": {**builtin.engine_trainers(), **trainers.engine_trainers()},
    "train_engines": {
        **torch_plugin.engine_train_engines(),
        "fsdp": TrainBackend(load=load, config=FSDPOptions),
    },
    "rollout_engines": {
        "hf": RolloutBackend(load=load),
        "vllm": RolloutBackend(load=load),
        "whole": RolloutBackend(load=load, sampling=frozenset({"temperature", "max_response_tokens"})),
    },
    "rewards": {
        "math": Reward(load=load, config=NoOptions),
        "format": Reward(load=load, config=FormatOptions),
    },
    "stages": {"keep": Stage(load=load)},
    "columns": {
        **builtin.engine_columns(),
        "teacher_entropy": Column(role="teacher", output="entropy"),
    },
    "data_sources": {
        "squares": DataSource(load=load, config=SquaresOptions),
        "columns": DataSource(load=load, config=SquaresOptions),
    },
    "curricula": {"rising": Curriculum(load=load, config=RisingOptions)},
    "advantages": {
        **builtin.engine_advantages(),
        **trainers.engine_advantages(),
        "twin": Advantage(load=load, config=SharedOptions),
        "calm": Advantage(load=load, needs=frozenset({"rewards", "teacher_entropy"})),
    },
    "losses": {
        **builtin.engine_losses(),
        **trainers.engine_losses(),
        "twin": Loss(load=load, config=SharedLossOptions),
        "near": Loss(load=load, needs=frozenset({"advantages", "teacher_log_probs"})),
    },
    "trackers": dict(tools.engine_trackers()),
    "runtimes": {**builtin.engine_runtimes(), **processes.engine_runtimes()},
    "weight_transports": {**builtin.engine_weight_transports(), **processes.engine_weight_transports()},
}

GOOD = """\
[model]
path = "some/model"
[actor.torch]
param_dtype = "bf16"
[[reward]]
name = "math"
[[reward]]
name = "format"
weight = 0.5
[reward.format]
pattern = "<answer>(.*)</answer>"
[data]
train = "train.jsonl"
"""


def spec_of(kind: str, name: str) -> Any:
    return SPECS[kind][name.rpartition(":")[2]]


@pytest.fixture
def specs() -> dict[str, dict[str, Any]]:
    return SPECS


@pytest.fixture
def good() -> str:
    """A complete run file."""
    return GOOD


@pytest.fixture
def config_of(tmp_path: Path) -> Any:
    """Text of a run file (and overrides) -> config."""

    def make(text: str, *overrides: str, env: dict[str, str] | None = None) -> EngineConfig:
        file = tmp_path / "run.toml"
        file.write_text(text, encoding="utf-8")
        raw = read_config([file], list(overrides), env or {})
        return validate(raw, spec_of, lambda kind: SPECS[kind].keys())

    return make


@pytest.fixture
def problems_of(config_of: Any) -> Any:
    """Text of a wrong run file -> its problems, each beginning with ``line: key: ``."""
    from engine_core.errors import ConfigError

    def find(text: str, *overrides: str, env: dict[str, str] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as error:
            config_of(text, *overrides, env=env)
        return [problem.partition("run.toml:")[2] or problem for problem in error.value.problems]

    return find
