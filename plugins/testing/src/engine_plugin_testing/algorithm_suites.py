"""The suites of advantage estimators, policy losses and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engine_plugin_testing import advantage_cases, imports, loss_cases, stage_cases
from engine_plugin_testing.suite import Suite


class AlgorithmSuite(Suite):
    """The base of these suites: a name, its options, examples.

    Attributes:
        name: the name, as in a run file.
        options: its table, as in ``[algorithm.NAME]`` or ``[stage.NAME]``.
        examples: what goes in, and what must come out; the suite of each kind says in which form.
    """

    section = "algorithm"
    fields: ClassVar[tuple[str, ...]] = ("name", "options", "plugins", "examples")

    name: str = ""
    options: Mapping[str, Any] = {}
    examples: Sequence[tuple[Any, Any]] = ()

    @classmethod
    def offered(cls) -> str:
        """Return the name."""
        return cls.name


class AdvantageSuite(AlgorithmSuite, modules=(imports, advantage_cases)):
    """A suite: the contracts of an advantage estimator. ``Suite`` has the other attributes.

    Attributes:
        name: the estimator, as in ``algorithm.advantage``.
        examples: pairs of groups and their advantages: ``([[0.0, 1.0], [1.0, 1.0]], [[-0.5, 0.5], [0.0, 0.0]])``. Each
            group is a list of rewards, each response gets one value. A response is 2 tokens of prompt and 3 of its
            own; an estimator with values that differ by token gets a list for each response.
    """

    kind = "advantages"
    bench = "engine_plugin_testing.algorithm_bench:AdvantageBench"


class LossSuite(AlgorithmSuite, modules=(imports, loss_cases)):
    """A suite: the contracts of a policy loss. ``Suite`` has the other attributes.

    Attributes:
        name: the loss, as in ``algorithm.loss``.
        examples: pairs of ``(log_prob, old_log_prob, advantage)`` of one token and its loss:
            ``((-1.0, -1.0, 2.0), -2.0)``. A list of three instead of a number has the tokens of a response, for a loss
            that averages over them: ``(([-1.0, -1.0, -2.0], -1.0, 2.0), [-1.433063] * 3)``.
    """

    kind = "losses"
    bench = "engine_plugin_testing.algorithm_bench:LossBench"


class StageSuite(AlgorithmSuite, modules=(imports, stage_cases)):
    """A suite: the contracts of a stage. ``Suite`` has the other attributes.

    Attributes:
        name: the stage, as in ``[[stage]] name``.
        examples: pairs of groups and what a new stage keeps of them: ``([[0.0, 1.0], [1.0, 1.0]], [[0, 1], []])``. Each
            group is a list of rewards; what is kept of it are positions.
    """

    kind = "stages"
    section = "stage"
    bench = "engine_plugin_testing.algorithm_bench:StageBench"

    @classmethod
    def table(cls) -> tuple[str, ...]:
        """Return the path of the stage's options."""
        return (cls.section, cls.name, cls.name)
