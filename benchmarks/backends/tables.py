"""What run.py prints: a row a case, and how far loss and gradient norm lie from those of the first case of the same model, type and batch."""

from __future__ import annotations

TOLERANCE = {"fp32": {"loss": 1e-5, "norm": 1e-5}, "bf16": {"loss": 2e-3, "norm": 2e-2}}
"""Relative. In bf16 each product is rounded to 8 bits, and kernels round in other orders."""


def against_first(rows):
    """Each row that ran with the relative differences of its first step (``loss``, ``norm``) and of the loss after it (``next``)."""
    first, found = {}, []
    for row in rows:
        if "error" in row:
            continue
        base = first.setdefault((row["model"], row["types"], row.get("prompt")), row)
        gaps = {
            "loss": _gap(row["losses"][0], base["losses"][0]),
            "norm": _gap(row["grad_norms"][0], base["grad_norms"][0]),
        }
        if len(row["losses"]) > 1:
            gaps["next"] = _gap(row["losses"][1], base["losses"][1])
        found.append((row, base, gaps))
    return found


def _gap(value, expected):
    return abs(value - expected) / abs(expected) if expected else abs(value)


def table(rows):
    """Markdown."""
    gaps = {row["case"]: gaps for row, _, gaps in against_first(rows)}
    head = "| case | tokens/s and GPU | MFU | GiB | micro-batches | ready s | first step s | loss | gap | norm | gap | next loss, gap |"
    lines = [head, "|" + "---|" * head.count(" |")]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['error'][:110]} |" + " |" * 10)
            continue
        own = gaps[row["case"]]
        rate = f"{row['tokens_per_s_and_gpu']:,.0f}" if "tokens_per_s_and_gpu" in row else "-"
        mfu = f"{row['mfu']:.1%}" if row.get("mfu") else "-"
        after = f"{own['next']:.1e}" if "next" in own else "-"
        lines.append(
            f"| {row['case']} | {rate} | {mfu} | {row['peak_gib']:.1f} | {row['micro_batches']} | {row['build_s']:.1f} "
            f"| {row['first_step_s']:.1f} | {row['losses'][0]:.7g} | {own['loss']:.1e} | {row['grad_norms'][0]:.6g} "
            f"| {own['norm']:.1e} | {after} |"
        )
    return "\n".join(lines)


def verdicts(rows):
    """A line for each model and type: what all were compared with, and who lies beyond the tolerance."""
    groups = {}
    for row, base, gaps in against_first(rows):
        bound = TOLERANCE[row["types"]]
        beyond = [f"{row['case']} ({key} {gaps[key]:.1e})" for key in bound if not gaps[key] <= bound[key]]
        groups.setdefault((row["model"], row["types"], base["case"]), []).append(beyond)
    told = []
    for (model, types, base), found in groups.items():
        beyond = [text for texts in found for text in texts]
        bound = ", ".join(f"{key} {value:g}" for key, value in TOLERANCE[types].items())
        told.append(
            f"{model} {types}: {len(found)} cases against '{base}' within {bound}: "
            + ("all" if not beyond else f"beyond: {'; '.join(beyond)}")
        )
    failed = [row["case"] for row in rows if "error" in row]
    return told + ([f"did not run: {', '.join(failed)}"] if failed else [])
