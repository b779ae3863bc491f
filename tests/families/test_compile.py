"""The train engine ``torch`` compiles the layers of every family (``compile = true``, inductor)."""

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.families import PASSES, RECURRENT, suites

SCOREBOARD = (pytest.mark.slow, pytest.mark.families)
globals().update(
    suites(
        TrainEngineSuite,
        PASSES,
        module=__name__,
        marks=SCOREBOARD,
        gaps=dict.fromkeys(RECURRENT, "recurrent layers run one sequence at a time and are not compiled"),
        backend="torch",
        options={"log_prob_chunk_tokens": 64, "compile": True},
        worker_context="compiled.py:no_fallback",
        deadline=600.0,
    )
)
