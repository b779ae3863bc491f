"""The owner's handle of a worker: the spans that it sends."""

import pytest

from engine_core import timeline
from engine_plugin_processes.worker_process import WorkerHandle


@pytest.fixture
def worker():
    timeline.drain()
    return WorkerHandle(3, None, None, "here")


def recorded(worker, sent, *spans):
    worker.record("actor", sent, spans)
    return timeline.drain()


def test_a_commands_span_is_in_the_lane_of_its_role_and_rank(worker):
    now = timeline.now()
    found = recorded(
        worker,
        now - 2,
        ("requests", "#1:0:0", "1:0:0", now - 1, now - 0.7),
        ("rollout", "sampler 0", "flow", now - 1, now - 0.6),
        ("", "run", "save", now - 1, now - 0.5),
    )
    assert [span[:3] for span in found] == [
        ("requests", "#1:0:0", "1:0:0"),
        ("rollout", "rank 3 sampler 0", "flow"),
        ("actor", "rank 3", "save"),
    ]
    assert [span[3:] for span in found] == [(now - 1, now - 0.7), (now - 1, now - 0.6), (now - 1, now - 0.5)]


@pytest.mark.parametrize("late", [-1000.0, 1000.0])
def test_a_clock_of_another_machine_is_corrected_to_the_time_between_command_and_answer(worker, late):
    sent = timeline.now() - 2
    theirs = sent + 0.5 - late
    ((*_, start, end),) = recorded(worker, sent, ("", "run", "save", theirs, theirs + 1))
    assert sent - 1e-6 <= start
    assert end <= timeline.now() + 1e-6
    assert end - start == pytest.approx(1, abs=1e-6)
