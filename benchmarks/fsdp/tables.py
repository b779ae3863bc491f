"""Rows of measure.py as one table: each against the DistributedDataParallel row before it of as many GPUs.

python benchmarks/fsdp/tables.py memory_1.json memory_2.json memory_4.json
"""

import argparse
import json
import sys
from pathlib import Path


def table(measured):
    """Markdown: tokens/s and memory of one GPU, and both in % of the copies'.

    Args:
        measured: for each file its rows.
    """
    lines = ["| case | GPUs | tokens/s and GPU | of DDP | GiB | of DDP |", "|---|---|---|---|---|---|"]
    for rows in measured:
        copied = None
        for row in rows:
            if " DDP" in row["case"]:
                copied = None if "error" in row else row
            lines.append(_line(row, copied))
    return "\n".join(lines)


def _line(row, copied):
    start = f"| {row['case']} | {row['world']} |"
    if "error" in row:
        return f"{start} {row['error'][:60]} | | | |"
    speed, memory = row["tokens_per_s_and_gpu"], row["peak_gib"]
    parts = [f"{speed:,.0f}", _share(speed, copied, "tokens_per_s_and_gpu")]
    parts += [f"{memory:.1f}", _share(memory, copied, "peak_gib")]
    return f"{start} {' | '.join(parts)} |"


def _share(value, copied, key):
    return f"{value / copied[key]:.0%}" if copied and copied[key] else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what measure.py wrote, one file of each run")
    print(table([json.loads(path.read_text("utf-8")) for path in parser.parse_args().files]))


if __name__ == "__main__":
    sys.exit(main())
