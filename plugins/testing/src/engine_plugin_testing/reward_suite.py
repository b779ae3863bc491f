"""The suite of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engine_plugin_testing import imports, reward_cases, reward_forms, reward_random, reward_steps
from engine_plugin_testing.suite import Suite


class RewardSuite(Suite, modules=(imports, reward_cases, reward_random, reward_steps)):
    """A suite: the contracts of a reward. ``Suite`` has the other attributes.

    Attributes:
        name: the reward, as in ``[[reward]] name``.
        options: its table, as in ``[reward.NAME]``.
        examples: pairs of a sample and its value: ``({"completion": "4", "answer": "4"}, 1.0)``; None if the reward
            does not apply. A text is a sample with that completion. Known keys: ``completion``, ``prompt``,
            ``completion_ids``, ``response_length``, ``finish_reason``; any other is a column of the data. A list of
            samples with a list of values is one group, for rewards that compare the samples of a group. A third entry is
            the answer that the reward reads in the response (``pred``), or the list of the group's:
            ``({"completion": "so 4.0", "answer": "4"}, 1.0, "4")``.
        failing: samples that cannot be scored, such as those for which a server answers with an error; the reward must
            fail and give no number. A pair of a sample and ``error`` or ``timeout`` names the kind of the failure.
        bounds: least and largest value; None: any. Every value in every contract is compared with them.
        timeout_seconds: as in ``[[reward]]``.
    """

    kind = "rewards"
    section = "reward"
    bench = "engine_plugin_testing.reward_bench:RewardBench"
    fields: ClassVar[tuple[str, ...]] = (
        "name",
        "options",
        "plugins",
        "examples",
        "failing",
        "bounds",
        "timeout_seconds",
    )

    name: str = ""
    options: Mapping[str, Any] = {}
    examples: Sequence[tuple[Any, Any] | tuple[Any, Any, Any]] = ()
    failing: Sequence[Any] = ()
    bounds: tuple[float, float] | None = None
    timeout_seconds: float = 60.0

    @classmethod
    def offered(cls) -> str:
        """Return the name of the reward."""
        return cls.name

    @classmethod
    def table(cls) -> tuple[str, ...]:
        """Return the path of the reward's options."""
        return (cls.section, cls.name, cls.name)


class RewardRunnerSuite(Suite, modules=(reward_forms,)):
    """A suite: the contracts of the reward runner and of the part ``reward_workers``. ``Suite`` has the other attributes.

    The kit brings the rewards. Give ``plugins`` if one offers another part ``reward_workers``.
    """

    kind = "rewards"
    section = "reward"
    bench = "engine_plugin_testing.reward_runner_bench:RewardRunnerBench"
    fields: ClassVar[tuple[str, ...]] = ("plugins",)

    @classmethod
    def setup_class(cls) -> None:
        """Prepare the workers."""
        cls._problem, cls._told = "", False
        cls._workers, cls._others = cls._group(cls.world_size), {}
