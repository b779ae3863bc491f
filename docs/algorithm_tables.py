"""Write ``docs/reference/algorithms.md`` from docstrings of the code.

    python docs/algorithm_tables.py            write what changed (`make docs` does this first)
    python docs/algorithm_tables.py --check    change nothing; exit 1 if the page is out of date

A function of a table has these lines in its docstring:

    Formula: ``A = R - mean``
    Paper: https://arxiv.org/abs/2503.20783
    Differs: where ours is not the paper's, or not that of others

``Formula`` is required; indented lines continue a field. If one function has several names, its module's docstring has
a table of them, and lines ``Differs (NAME): ...``. A test runs ``--check``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engine_core import builtin
from engine_core.algorithms import correction, losses, objectives, regularizers
from engine_plugin_tools import eval_metrics
from engine_plugin_trainers import plugin as trainers
from engine_plugin_trainers.algorithms import preference, preference_columns

if TYPE_CHECKING:
    from engine_core.specs import Spec

OVERVIEW = Path(__file__).parent / "reference" / "algorithms.md"
LINK = r"https?://(?:arxiv\.org/abs/|doi\.org/)?([^\s,]+)"
FIELDS = ("Formula", "Paper", "Differs")
TRAINERS = "engine-plugin-trainers"

Functions = Mapping[str, Callable[..., Any]]


def offered(table: Mapping[str, Spec]) -> Functions:
    """Return the functions behind the names of a table hook; a factory makes its function of other tables, and is left out."""
    return {name: spec.resolve() for name, spec in table.items() if not getattr(spec, "factory", False)}


TABLES: Mapping[str, tuple[str, Callable[[], Functions]]] = {
    "advantages": ("`advantage`", lambda: offered(builtin.engine_advantages())),
    "losses": ("`loss`", lambda: offered(builtin.engine_losses())),
    "advantages of trainers": (f"`advantage` of {TRAINERS}", lambda: offered(trainers.engine_advantages())),
    "losses of trainers": (f"`loss` of {TRAINERS}", lambda: offered(trainers.engine_losses())),
    "stages of trainers": (f"`[[stage]] name` of {TRAINERS}", lambda: offered(trainers.engine_stages())),
}
"""Name of the table: its first heading, and the functions in it."""


def fields(function: Callable[..., Any]) -> dict[str, str]:
    """``Formula``, ``Paper`` and ``Differs`` of a docstring, as Markdown in one line each."""
    text = inspect.getdoc(function) or ""
    found = {}
    for name in FIELDS:
        line = re.search(rf"^{name}: (.*(?:\n[ ]+.*)*)", text, re.MULTILINE)
        found[name] = re.sub(r"\s+", " ", line[1]).replace("``", "`").strip() if line else ""
    if not found["Formula"]:
        raise SystemExit(
            f"{function.__module__}.{function.__qualname__}: no line 'Formula: ...' in its docstring."
        )
    found["Paper"] = re.sub(LINK, _link, found["Paper"])
    return found


def listed(module: ModuleType) -> dict[str, dict[str, str]]:
    """Name -> ``what it is``, ``Formula``, ``Paper``, ``Differs``, from the table in a module's docstring."""
    text = inspect.getdoc(module) or ""
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if re.fullmatch(r"=+( =+)+", line)]
    starts = [match.start() for match in re.finditer(r"=+", lines[rules[0]])]

    def cells(line: str) -> list[str]:
        return [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]

    header = cells(lines[rules[0] + 1])
    rows: list[list[str]] = []
    for line in lines[rules[1] + 1 : rules[2]]:
        if line[: starts[1]].strip():
            rows.append(cells(line))
        else:  # goes on
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells(line), strict=True)]
    found = {}
    for name, *values in rows:
        said = dict(zip(header[1:], values, strict=True))
        differs = re.search(rf"^Differs \({re.escape(name)}\): (.*)", text, re.MULTILINE)
        paper = re.sub(r"arXiv:(\S+)", r"https://arxiv.org/abs/\1", said.get("paper", ""))
        found[name] = {
            "what": said.get("what it is", ""),
            "distribution": distribution(module.__name__),
            "Formula": said["formula"].replace("``", "`"),
            "Paper": re.sub(LINK, _link, paper),
            "Differs": differs[1] if differs else "",
        }
    return found


def described(functions: Functions) -> dict[str, dict[str, str]]:
    """Return the same of functions whose docstrings have the fields."""
    return {
        name: {"what": first_sentence(function), "distribution": distribution(function.__module__)}
        | fields(function)
        for name, function in functions.items()
    }


def distribution(module: str) -> str:
    """Return the name of the distribution that brings a module."""
    package = module.partition(".")[0]
    return "engine-core-rl" if package == "engine_core" else package.replace("_", "-")


def first_sentence(function: Callable[..., Any]) -> str:
    text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return text.rstrip(".").replace("``", "`")


def kinds() -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Yield each kind, as the key that names it, and everything of that kind; a plugin's names may be a kind ``KEY of PLUGIN``."""
    for heading, functions in TABLES.values():
        yield heading.replace("`", ""), described(functions())
    yield "loss_aggregation", listed(objectives)
    yield "kl_estimator", listed(regularizers)
    yield "kl_target", described({"kl_target": regularizers.AdaptiveKL})
    yield "entropy_target", described({"entropy_target": regularizers.AdaptiveEntropy})
    yield "top_entropy_quantile", described({"top_entropy_quantile": regularizers.high_entropy})
    yield "correction", listed(correction)
    yield "dpo.loss", listed(preference)
    weights = {"wpo": preference_columns.policy_weights, "ld_alpha": preference_columns.tail_weights}
    yield "dpo", described(weights)
    trained = {**offered(trainers.engine_objectives()), **offered(builtin.engine_objectives())}
    trained["value"] = losses.value  # the formula of the critic's objective is that of its loss
    trained["policy"] = objectives.policy  # a factory adds the loss that it names
    yield "objective", described(trained)
    yield "eval", described({"pass@k": eval_metrics.pass_at_k, "maj@k": eval_metrics.majority_at_k})


TITLES = {
    "objective": "Objectives",
    "[[stage]] name": "Stages",
    "advantage": "Advantages",
    "loss": "Policy losses",
}

ABOUT = """\
Every algorithm with its formula, its paper, and where this implementation differs from the paper or from other programs.
[Algorithms](../algorithms.md), [preferences](../preference.md) and [evaluation](../evaluation.md) say how to use them.

R is the reward of a rollout; n, mean and std (n - 1) are those of its group; A is the advantage of a token; G_t is what a token and
those after it earned; whiten(x) is `(x - mean) / sqrt(var + 1e-8)` over the whole batch of the step. `p` is the policy in training, `p_old` the
policy before this step's updates, `p_rollout` the policy that sampled, `p_ref` the reference; r = p / p_old; sg() has no gradient. A ratio
is computed from a log-ratio clamped to -20..20, so that one token cannot overflow the batch."""


def overview() -> str:
    """Return the page: a section for each key, with a table of its names."""
    sections: dict[str, list[list[str]]] = {}
    for kind, entries in kinds():
        rows = sections.setdefault(kind.partition(" of ")[0], [])
        for name, said in entries.items():
            rows.append([f"`{name}`", said["what"], *(said[field] for field in FIELDS), said["distribution"]])
    header = ["name", "what it is", "formula", "paper", "where ours differs", "distribution"]
    parts = []
    for key, rows in sections.items():
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            for row in (header, ["---"] * 6, *rows)
        ]
        parts += [f"## {TITLES.get(key, f'`{key}`')}", "\n".join(lines)]
    note = (
        "<!-- Written by docs/algorithm_tables.py from the code. Change the code, then run `make docs`. -->"
    )
    return "\n\n".join([note, "# Algorithm reference", ABOUT, *parts]) + "\n"


def _link(match: re.Match[str]) -> str:
    return f"[{match[1].removeprefix('github.com/')}]({match[0]})"


def main() -> int:
    current = OVERVIEW.exists() and OVERVIEW.read_text("utf-8") == overview()
    if "--check" in sys.argv:
        if not current:
            print(f"{OVERVIEW} is out of date. Run: python docs/algorithm_tables.py")
        return 0 if current else 1
    OVERVIEW.write_text(overview(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
