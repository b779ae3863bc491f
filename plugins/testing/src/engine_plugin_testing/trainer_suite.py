"""The suites of trainers and environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engine_plugin_testing import environment_cases, trainer_cases
from engine_plugin_testing.algorithm_suites import AlgorithmSuite


class TrainerSuite(AlgorithmSuite, modules=(trainer_cases,)):
    """A suite: the contracts of a trainer, in short runs on a random model. ``Suite`` has the other attributes.

    Attributes:
        name: the trainer, as in ``trainer = "NAME"``.
        options: its table, as in ``[NAME]``.
        keys: further keys of the run file, dotted: ``{"rollout.group_size": 8, "stage": [{"name": "pf_ppo_resample"}]}``.
        rows: rows of data; default: sums, with the columns ``prompt``, ``response`` and ``answer``. A trainer that reads
            ``[[reward]]`` gets a reward for digits. A spec with empty ``sections`` reads it.
    """

    kind = "trainers"
    section = ""
    bench = "engine_plugin_testing.trainer_bench:TrainerBench"
    fields: ClassVar[tuple[str, ...]] = ("name", "options", "plugins", "keys", "rows")

    keys: Mapping[str, Any] = {}
    rows: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def table(cls) -> tuple[str, ...]:
        """Return the path of the trainer's options."""
        return (cls.name,)


class EnvironmentSuite(AlgorithmSuite, modules=(environment_cases,)):
    """A suite: the contracts of an environment, in short runs on a random model. ``Suite`` has the other attributes.

    Attributes:
        name: the environment, as in ``[environment] name``.
        options: its table, as in ``[environment.NAME]``.
        keys: further keys of the run file: ``{"environment.max_turns": 5}``.
        rows: rows of data; default: sums, with the columns ``prompt`` and ``answer``.
        chat: the tokenizer has a chat template, which shows tools, and each prompt is a user message; for environments
            that append messages or declare tools.
    """

    kind = "environments"
    section = "environment"
    bench = "engine_plugin_testing.trainer_bench:EnvironmentBench"
    fields: ClassVar[tuple[str, ...]] = ("name", "options", "plugins", "keys", "rows", "chat")

    keys: Mapping[str, Any] = {}
    rows: Sequence[Mapping[str, Any]] = ()
    chat: bool = False
