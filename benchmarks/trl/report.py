"""From what the processes wrote to lanes, gates and a table; what is missing is said, and voids the figures.

Jobs are named ``LANE FRAMEWORK time NUMBER``, ``LANE FRAMEWORK gates`` and ``learn FRAMEWORK NUMBER``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import figures
from jobs import FRAMEWORKS, Found

Results = Mapping[str, Mapping[str, Any]]  # of jobs, by name


def gates(found: Found, lanes: Sequence[str], rounding: Mapping[str, str]) -> list[tuple[str, figures.Gate]]:
    """G0 to G5, each with the lane that it is of.

    Args:
        found: what there is so far.
        lanes: that were asked for.
        rounding: of each lane: a key of ``figures.LOSS_WITHIN``.
    """
    made = [("both", learning(found))]
    for lane in lanes:
        made += [(lane, gate) for gate in lane_gates(found.results, lane, rounding[lane])]
    timed = [result for name, result in found.results.items() if not name.startswith("learn ")]
    made.append(("both", figures.same_inputs(timed)))
    return made


def lane_gates(results: Results, lane: str, rounding: str) -> list[figures.Gate]:
    """G1 to G3 and G5 of one lane."""
    trl, engine = (results.get(f"{lane} {name} gates") for name in FRAMEWORKS)
    same = results.get(f"{lane} engine same")
    steps = {name: [step for each in processes(results, lane, name) for step in each] for name in FRAMEWORKS}
    for name, result in zip(FRAMEWORKS, (trl, engine), strict=True):
        steps[name] += result["steps"] if result else []
    made = [
        figures.same_maths(trl["same_batch"], same["same_batch"], rounding)
        if trl and same
        else missing("G1 same batch, same maths"),
        figures.same_policy(engine["steps"], rounding) if engine else missing("G2 sampler and trainer"),
    ]
    for name, result in (("trl", trl), ("engine", engine)):
        made.append(
            figures.moved_weights(name, result["sampler"], result["trainer"])
            if result
            else missing(f"G3 weights of {name}")
        )
    made.append(
        figures.same_tokens(steps["trl"], steps["engine"])
        if all(steps.values())
        else missing("G5 response tokens a step")
    )
    return made


def learning(found: Found) -> figures.Gate:
    """G4."""
    curves = rewards(found.results)
    lost = [name for name in found.failures if name.startswith("learn ")]
    if lost or not all(curves.values()):
        return missing("G4 both learn alike")
    return figures.learns(**curves)


def rewards(results: Results) -> dict[str, list[list[float]]]:
    """Reward of each step, a list for each seed, of both frameworks."""
    return {
        name: [
            curve
            for job, each in sorted(results.items())
            if job.startswith(f"learn {name}")
            for curve in each["rewards"]
        ]
        for name in FRAMEWORKS
    }


def missing(name: str) -> figures.Gate:
    """A gate that was not looked at."""
    return figures.Gate(name, False, "not run")


def processes(results: Results, lane: str, framework: str) -> list[list[dict[str, float]]]:
    """The timed steps of each process."""
    return [each["steps"][each["warm_up"] :] for each in timed(results, lane, framework)]


def timed(results: Results, lane: str, framework: str) -> list[Mapping[str, Any]]:
    """What the timing processes of one lane and framework wrote."""
    return [each for job, each in sorted(results.items()) if job.startswith(f"{lane} {framework} time ")]


def lane(results: Results, name: str) -> dict[str, Any]:
    """Figures of one lane: of each framework that was timed, and of both their ratio."""
    found: dict[str, Any] = {
        framework: side(timed(results, name, framework), processes(results, name, framework))
        for framework in FRAMEWORKS
        if timed(results, name, framework)
    }
    if len(found) < len(FRAMEWORKS):
        return found
    wall, cpu = (
        {
            framework: [[step[clock] for step in each] for each in processes(results, name, framework)]
            for framework in FRAMEWORKS
        }
        for clock in ("wall", "cpu")
    )
    ratio, low, high = figures.ratio_interval(wall["trl"], wall["engine"])
    return found | {
        "ratio": ratio,
        "interval": [low, high],
        "cpu_ratio": figures.ratio_interval(cpu["trl"], cpu["engine"])[0],
    }


def side(told: Sequence[Mapping[str, Any]], steps: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Figures of one framework in one lane."""
    flat = [step for each in steps for step in each]
    seconds = figures.summary([step["wall"] for step in flat])
    return {
        "wall": seconds,
        "cpu": figures.summary([step["cpu"] for step in flat]),
        "generate": figures.summary([step["generate"] for step in flat]),
        "response_tokens_per_second": flat[0]["completion_tokens"] / seconds["median"],
        "train_tokens_per_second": flat[0]["train_tokens"] / seconds["median"],
        "first_step_seconds": [each["first_step_seconds"] for each in told],
        "processes": [[step["wall"] for step in each] for each in steps],
        "memory": told[-1]["memory"], "settings": told[-1]["settings"],
        "surroundings": told[-1]["surroundings"],
    }  # fmt: skip


def table(lanes: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| lane | | seconds a step (p10 to p90) | of it sampling | CPU seconds | first step after | GiB | steps/s beside TRL (95%) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in lanes.items():
        for framework in FRAMEWORKS:
            if framework not in found:
                lines.append(f"| {name} | {framework} | not measured | | | | | |")
                continue
            each, wall = found[framework], found[framework]["wall"]
            beside = "1"
            if framework == "engine":
                low_high = found.get("interval")
                beside = (
                    f"**{found['ratio']:.2f}** ({low_high[0]:.2f} to {low_high[1]:.2f})" if low_high else ""
                )
            lines.append(
                f"| {name} | {framework} | {wall['median']:.2f} ({wall['p10']:.2f} to {wall['p90']:.2f}) "
                f"| {each['generate']['median']:.2f} | {each['cpu']['median']:.2f} "
                f"| {max(each['first_step_seconds']):.0f} s | {max(each['memory'].values()):.1f} | {beside} |"
            )
    return "\n".join(lines)
