"""One group of processes a number of ranks, for a file: it takes far longer to start than a case."""

from pathlib import Path

import pytest

from engine_plugin_testing.launcher import Workers

HERE = Path(__file__).parent


def cases_on(world_size):
    workers = Workers(world_size, context="engine_plugin_megatron.cpu_emulation:emulated", root=HERE.parent)
    yield lambda case, **settings: workers.run(f"{HERE}/cases.py:Bench", f"{HERE}/cases.py:{case}", settings)
    workers.close()


@pytest.fixture(scope="module")
def two_ranks():
    yield from cases_on(2)


@pytest.fixture(scope="module")
def four_ranks():
    yield from cases_on(4)
