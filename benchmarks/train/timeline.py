"""The share of a step that the timeline takes: recording spans in the controller's process, and writing them.

    python benchmarks/train/timeline.py run.toml

Trains as the run file says, in a temporary folder. The spans of a step that the controller records or receives are counted and
multiplied by the cost of one, measured alone; the calls of the writer are timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from engine_core import load_config, timeline
from engine_core.config.assemble import plugins_for
from engine_plugin_tools.timeline import TimelineFile

SPANS = 40_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="run file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    arguments = parser.parse_args()
    start = time.perf_counter()
    for _ in range(SPANS):
        with timeline.span("step"):
            pass
    cost = (time.perf_counter() - start) / SPANS
    found: list[tuple[int, float, float]] = []  # spans, seconds of the writer, seconds of the step
    write, drain = TimelineFile.write, timeline.drain

    def timed(self, processes, metrics):
        begin, count = time.perf_counter(), len(timeline._spans)
        metrics_of_spans = write(self, processes, metrics)
        found.append((count, time.perf_counter() - begin, metrics["time/step"]))
        return metrics_of_spans

    drain()
    TimelineFile.write = timed
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            arguments.file, overrides=[*arguments.sets, f"run.dir={folder}"], allow_code=True
        )
        trainer = plugins_for(config).resolve("trainers", config.trainer)(config)
        try:
            trainer.train()
        finally:
            trainer.close()
    spans, writing, step = (statistics.median(column) for column in zip(*found[1:], strict=True))
    share = statistics.median((count * cost + seconds) / whole for count, seconds, whole in found[1:])
    print(
        f"{spans:.0f} spans a step of {step:.3f} s; {cost * 1e6:.1f} us a span, {writing * 1e3:.2f} ms to write: {share:.3%} of a step"
    )


if __name__ == "__main__":
    main()
