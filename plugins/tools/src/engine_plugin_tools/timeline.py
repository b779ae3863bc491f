"""The timeline of a run: its file in the run folder, metrics of its spans, and the trace that viewers open.

The file has a line for each span, as JSON. Once it has ``MOST_BYTES`` it becomes the older file, in place of the one
before, so both together hold the newest spans of the run. A resumed run appends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import timeline
from engine_core.errors import DataError

if TYPE_CHECKING:
    from engine_core.timeline import Span
    from engine_core.train.run import TrainingRun

FILE, OLDER = "timeline.jsonl", "timeline.older.jsonl"
MOST_BYTES = 32 * 2**20
GAP_SECONDS = 1e-3  # calls of one method with at most this time between them are one span
STEP = "step "
RANK = re.compile(r"rank \d+")

log = logging.getLogger("engine")


class TimelineFile:
    """The file with the spans of a run; ``TimelineWriter`` describes its methods.

    Args:
        folder: the run folder.
        run: the run's trainer.
    """

    def __init__(self, folder: Path, run: TrainingRun) -> None:
        from engine_plugin_tools.floors import StepFloors  # imports torch, which `engine trace` does not need

        self.folder, self.floors = folder, StepFloors(run)
        timeline.drain()  # of what this process did before the run

    def write(self, processes: Mapping[str, int], metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the spans since the last call; return ``time/idle/NAME``, ``throughput/NAME_in_flight``, MFU and floor."""
        spans = joined(timeline.drain())
        self._append(spans)
        seconds, end = metrics["time/step"], timeline.now()
        busy = busy_seconds(spans, end - seconds, end)
        groups = {span[0] for span in spans if span[1].startswith("#")}
        return {
            **{f"time/idle/{role}": max(1 - busy[role] / seconds / n, 0.0) for role, n in processes.items()},
            **{f"throughput/{group}_in_flight": busy[group] / seconds for group in groups},
            **self.floors.of(metrics),
        }

    def close(self) -> None:
        """Write the spans since the last step."""
        self._append(joined(timeline.drain()))

    def _append(self, spans: Sequence[Span]) -> None:
        path = self.folder / FILE
        lines = [json.dumps([*span[:3], round(span[3], 6), round(span[4], 6)]) for span in spans]
        try:
            if path.is_file() and path.stat().st_size > MOST_BYTES:
                path.replace(self.folder / OLDER)
            with path.open("a", encoding="utf-8") as file:
                # first the end of the last line, also of one that a crash has cut
                file.write("\n".join(["", *lines]))
        except OSError as error:
            log.warning("The timeline lacks %d spans, which could not be written: %s", len(spans), error)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans by their ends, calls of a method that follow each other as one span."""
    found: list[Span] = []
    last: dict[tuple[str, str, str], int] = {}
    for span in sorted(spans, key=lambda span: (span[4], -span[3])):
        group, lane, name, start, end = span
        at = last.get((group, lane, name))
        if at is not None and 0 <= start - found[at][4] <= GAP_SECONDS:
            found[at] = (group, lane, name, found[at][3], end)
        else:
            last[group, lane, name] = len(found)
            found.append(span)
    return found


def busy_seconds(spans: Iterable[Span], first: float, last: float) -> defaultdict[str, float]:
    """Return the seconds from ``first`` to ``last`` in which a rank or an ``#ID`` of a group has a span, summed over them."""
    until = defaultdict[tuple[str, str], float](
        lambda: first
    )  # by lane, the end of the seconds that are counted
    found = defaultdict[str, float](float)
    for group, lane, _, start, end in sorted(spans, key=lambda span: span[3]):
        if lane.startswith("#") or RANK.fullmatch(lane):
            counted = until[group, lane]
            found[group] += max(min(end, last) - max(start, counted), 0.0)
            until[group, lane] = max(end, counted)
    return found


def ranks_of(spans: Iterable[Span]) -> int:
    """Return the number of ranks that have spans."""
    return len({lane for _, lane, *_ in spans if RANK.fullmatch(lane)})


def read_spans(folder: Path) -> list[Span]:
    """Return the spans of a run by their start, without a last line that a crash has cut.

    Raises:
        DataError: the run has no timeline.
    """
    files = [path for name in (OLDER, FILE) if (path := folder / name).is_file()]
    spans: list[Span] = []
    for line in (line for path in files for line in path.read_text("utf-8").splitlines() if line):
        with contextlib.suppress(json.JSONDecodeError):  # cut by a crash
            spans.append(tuple(json.loads(line)))
    if not spans:
        raise DataError(f"{folder / FILE} has no span: no step of this run has ended.")
    return sorted(spans, key=lambda span: (span[3], -span[4]))


def of_steps(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """Return the spans that overlap steps ``first`` to ``last``, in every attempt of the run that did them.

    Raises:
        DataError: the timeline has none of the steps.
    """
    steps = [
        (int(name.removeprefix(STEP)), start, end)
        for group, _, name, start, end in spans
        if group == timeline.CONTROLLER and name.startswith(STEP)
    ]
    if not (chosen := [(start, end) for step, start, end in steps if first <= step <= last]):
        known = sorted({step for step, _, _ in steps})
        has = f"steps {known[0]} to {known[-1]}" if known else "no whole step"
        raise DataError(f"--steps {first}:{last}: the timeline has {has}.")
    return [span for span in spans if any(span[3] < end and span[4] > start for start, end in chosen)]


def as_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Return spans as a trace in the Chrome trace event format, which Perfetto opens; times in microseconds.

    Args:
        spans: by their start.
    """
    numbers: dict[str, int] = {timeline.CONTROLLER: 1}
    lanes: dict[tuple[str, str], int] = {}
    events, zero = list[dict[str, Any]](), spans[0][3]
    for span, lane in zip(spans, laid_out(spans), strict=True):
        group, _, name, start, end = span
        process = numbers.setdefault(group, len(numbers) + 1)
        thread = lanes.setdefault((group, lane), len(lanes) + 1)
        times = {"ts": round((start - zero) * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
        events.append({"ph": "X", "name": name, "pid": process, "tid": thread, **times})
    for group, process in numbers.items():
        named = {"name": "process_name", "args": {"name": group}}
        events.append({"ph": "M", "pid": process, **named})
        order = {"name": "process_sort_index", "args": {"sort_index": process}}
        events.append({"ph": "M", "pid": process, **order})
    for (group, lane), thread in lanes.items():
        named = {"name": "thread_name", "args": {"name": lane}}
        events.append({"ph": "M", "pid": numbers[group], "tid": thread, **named})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start": zero}}


def laid_out(spans: Sequence[Span]) -> list[str]:
    """Return the lane in which each span is shown; the spans of a shown lane nest.

    Args:
        spans: by their start, longer ones first.
    """
    ends: dict[tuple[str, str], float] = {}
    for group, lane, _, _, end in spans:
        ends[group, lane] = max(end, ends.get((group, lane), end))
    free_at = defaultdict[str, list[float]](list)  # by group, the end of each lane for spans of any lane
    given: dict[tuple[str, str], str] = {}
    open_spans = defaultdict[tuple[str, str], list[float]](list)  # by shown lane, the ends of the open spans
    found = []
    for group, lane, _, start, end in spans:
        if lane.startswith("#"):
            if (group, lane) not in given:
                free = free_at[group]
                at = next((number for number, until in enumerate(free) if until <= start), len(free))
                free[at : at + 1] = [ends[group, lane]]
                given[group, lane] = f"{group} {at}"
            lane = given[group, lane]
        number, shown = 1, lane
        while not _nests(open_spans[group, shown], start, end):
            number += 1
            shown = f"{lane} ({number})"
        open_spans[group, shown].append(end)
        found.append(shown)
    return found


def _nests(ends: list[float], start: float, end: float) -> bool:
    """Return whether a span lies inside the innermost open one; remove those that have ended."""
    while ends and ends[-1] <= start:
        ends.pop()
    return not ends or end <= ends[-1]
