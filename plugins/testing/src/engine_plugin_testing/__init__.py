"""The conformance kit: the promises of every plugin of one kind, as tests that it runs in five lines.

::

    from engine_plugin_testing import TrainEngineSuite


    class TestMine(TrainEngineSuite):
        backend = "mine"

``pytest -v`` then shows one line for each contract. The suites are those of ``__all__``: of engines, runtimes,
transports, rewards, advantages, losses, stages, trainers and environments. ``python -m engine_plugin_testing`` prints their contracts.

How it works: a *contract* is a function with a promise (``contracts``), in a module of cases (``train_outputs``,
``train_steps``, ``rollout_sampling``, ``reward_cases``, ...). It receives a *bench* (``train_bench``,
``rollout_bench``, ``reward_bench``, ``runtime_bench``, ``transport_bench``) that builds the plugin as a run would, and
compares with slow independent values (``reference``). ``launcher`` starts the ``worker`` processes once for a class
and has each contract run in all of them; contracts hold for any number of ranks.

Left out on purpose: speed, memory, and how good a training run is. Suites of train engines need the extra ``torch``;
those of rollout engines, runtimes and transports, and of engines of several ranks, ``processes``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_plugin_testing.algorithm_suites import AdvantageSuite, LossSuite, StageSuite
    from engine_plugin_testing.reward_suite import RewardRunnerSuite, RewardSuite
    from engine_plugin_testing.rollout_suite import RolloutEngineSuite
    from engine_plugin_testing.runtime_suite import RuntimeSuite
    from engine_plugin_testing.train_suite import TrainEngineSuite
    from engine_plugin_testing.trainer_suite import EnvironmentSuite, TrainerSuite
    from engine_plugin_testing.transport_suite import TransportSuite

HOMES = {
    "AdvantageSuite": "algorithm_suites",
    "EnvironmentSuite": "trainer_suite",
    "LossSuite": "algorithm_suites",
    "TrainEngineSuite": "train_suite",
    "TrainerSuite": "trainer_suite",
    "RolloutEngineSuite": "rollout_suite",
    "RewardRunnerSuite": "reward_suite",
    "RewardSuite": "reward_suite",
    "RuntimeSuite": "runtime_suite",
    "StageSuite": "algorithm_suites",
    "TransportSuite": "transport_suite",
}

__all__ = [
    "AdvantageSuite",
    "EnvironmentSuite",
    "LossSuite",
    "RewardRunnerSuite",
    "RewardSuite",
    "RolloutEngineSuite",
    "RuntimeSuite",
    "StageSuite",
    "TrainEngineSuite",
    "TrainerSuite",
    "TransportSuite",
]


def __getattr__(name: str) -> Any:
    # On first use: the suite of rewards imports no torch, a worker no pytest.
    if name in HOMES:
        return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
