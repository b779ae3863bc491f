"""What must be true of a teacher whose backend only scores."""

from types import SimpleNamespace

import pytest

from engine_core.config import EngineConfig
from engine_core.errors import ConfigError
from engine_core.train.models import _check_temperature


def run_of(rollout, own="absent", frozen_only=True):
    config = EngineConfig(
        trainer="distill", rollout={"temperature": rollout}, teacher={"path": "t", "backend": "b"}
    )
    config.options = None if own == "absent" else SimpleNamespace(temperature=own)
    plugins = SimpleNamespace(spec=lambda kind, name: SimpleNamespace(frozen_only=frozen_only))
    return config, plugins


@pytest.mark.parametrize(
    "asked", [run_of(1.0), run_of(1.0, None), run_of(0.5, 1.0), run_of(0.5, frozen_only=False)]
)
def test_a_teacher_that_only_scores_is_asked_at_temperature_1(asked):
    _check_temperature(*asked)


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (run_of(0.5), "rollout.temperature"),
        (run_of(0.5, None), "rollout.temperature"),
        (run_of(1.0, 2.0), "distill.temperature"),
    ],
)
def test_at_another_temperature_it_is_refused_by_key(asked, key):
    with pytest.raises(ConfigError, match=rf"{key}: teacher\.backend = 'b' tells log-probs at temperature 1"):
        _check_temperature(*asked)
