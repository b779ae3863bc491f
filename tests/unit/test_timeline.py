"""The recorder of spans of a process."""

import pytest

from engine_core import timeline


@pytest.fixture(autouse=True)
def empty():
    timeline.drain()
    yield
    timeline.drain()


def test_the_newest_spans_are_kept_and_older_ones_dropped():
    for number in range(timeline.MOST + 10):
        timeline.add("actor", "rank 0", str(number), 0.0, 1.0)
    spans = timeline.drain()
    assert len(spans) == timeline.MOST
    assert [spans[0][2], spans[-1][2]] == ["10", str(timeline.MOST + 9)]
    assert timeline.drain() == []


def test_dropped_spans_are_a_warning_once_in_a_process(monkeypatch, caplog):
    timeline._warn.cache_clear()
    timeline.add("actor", "rank 0", "few", 0.0, 1.0)
    timeline.drain()
    assert caplog.text == ""
    monkeypatch.setattr(timeline, "MOST", 3)
    for _ in range(2):
        for _ in range(3):
            timeline.add("actor", "rank 0", "many", 0.0, 1.0)
        timeline.drain()
    assert caplog.text.count("The timeline lacks spans: it keeps the newest 3 of a step.") == 1


def test_a_span_is_recorded_with_its_times_also_when_its_context_fails():
    before = timeline.now()
    with pytest.raises(KeyError), timeline.span("train"):
        raise KeyError
    ((group, lane, name, start, end),) = timeline.drain()
    assert (group, lane, name) == ("controller", "run", "train")
    assert before <= start <= end <= timeline.now()
