"""Writes the pages of ``docs/reference/`` from the code, so that they say what the code does, and the install hints of plugins.

    python docs/references.py            write what changed (`make docs` does this first)
    python docs/references.py --check    change nothing; name the pages that are out of date, exit 1

The pages are committed, so that they can be read on a git host. A test runs ``--check``.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from engine_core import errors
from engine_core import hooks as hookspecs
from engine_core.cli.main import app
from engine_core.plugins.metadata import TABLES
from engine_core.plugins.modules import CAPABILITIES, table_module
from engine_core.specs import TABLE_SPECS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))
import api_pages
from config_pages import CONFIG_PAGES, config_index, config_page, our_offers, project_files
from page_parts import page, plain, table

# -- hooks ------------------------------------------------------------------


def hooks_page() -> str:
    """Return every hook: those of ``engine_core.hooks``, and those of tables that our plugins define."""
    found: dict[str, list[str]] = {"step": [], "table": [], "observer": [], "of plugins": []}
    for name, function in vars(hookspecs).items():
        if hasattr(function, "engine_spec"):
            found[sort_of(function)].append(hook_part(name, function))
    for (kind, name), offer in our_offers().items():
        if kind == TABLES:
            part = hook_part(f"engine_{name}", getattr(table_module(name), f"engine_{name}"))
            found["of plugins"].append(f"{part}\n\nDefined by `{offer.distribution.name}`.")
    titles = {
        "step": f"Step hooks\n\n{STEP_HOOKS}",
        "table": f"Table hooks\n\n{TABLE_HOOKS}",
        "of plugins": "Table hooks of plugins",
        "observer": "Observers, and options of plugins",
    }
    parts = [part for sort, title in titles.items() for part in (f"## {title}", *found[sort])]
    rows = [
        [TABLE_SPECS[kind].noun, f"`{capability}`", f"`{method}`"]
        for kind, methods in CAPABILITIES.items()
        for capability, method in methods.items()
    ]
    methods = table(["engine", "capability", "method"], rows)
    parts += [OWN_TABLE.strip(), f"## Capabilities and their methods\n\n{CAPABILITY}\n\n{methods}"]
    return page(
        "Hook reference",
        "For authors of plugins: every point that a plugin can change. [Write a plugin](../plugins.md) shows the main ones at work.\n"
        "Implement a hook with `@hookimpl` and take only the arguments you need.",
        *parts,
    )


STEP_HOOKS = """\
A step hook decides one step of building a model, or of handing its weights to a sampler. Plugins are asked in
[order](../plugins.md#which-plugins-a-run-uses) until one answers with something other than None. Only a collective hook may wait for other ranks."""
TABLE_HOOKS = """\
A table hook offers names for run files. Its first line shows where a run file uses the name. It returns a dict with a spec for each name. The engine calls it
in every process that loads plugins, before models are built, and collects the dicts of all plugins that the run uses."""
CAPABILITY = """\
An engine's class must override the method of each capability that its spec declares. [What a run gains](../rollout_engine.md#capabilities) from each."""
OWN_TABLE = '''\
## A table of your own: `engine.tables`

A plugin can let other plugins offer names of a new kind. It defines a table for them: a module with the class of its entries, `SPECS`, and the hook specification.

```py
from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.hooks import hookspec
from engine_core.specs import Spec


@dataclass(frozen=True, kw_only=True)
class Grader(Spec):
    """A grader: ``load`` is a function of a text that returns a mark."""

    kind = "graders"
    noun = "grader"


SPECS = {"graders": Grader}


@hookspec
def engine_graders() -> Mapping[str, Grader]:
    """Offer graders: ``[reward.school] grader = "NAME"``."""
```

Its entry point names that module. Other plugins then offer their names in the entry-point group `engine.graders`, called after the table:

```toml
[project]
name = "engine-plugin-school"

[project.entry-points."engine.tables"]
graders = "engine_plugin_school.tables"
```

`PluginSet.load({"graders": [name]})` loads a name. `find("graders", name)` of `engine_core.plugins.metadata` gives the distributions that offer the name.
'''


def sort_of(function: Any) -> str:
    if function.engine_spec["firstresult"]:
        return "step"
    return "table" if "Mapping" in function.__annotations__["return"] else "observer"


def hook_part(name: str, function: Any) -> str:
    signature = str(inspect.signature(function)).replace("'", "")
    if len(name + signature) > 88:  # an argument a line
        inside, _, result = signature[1:].rpartition(")")
        signature = "(\n    " + re.sub(r", (?=\w+:)", ",\n    ", inside) + "\n)" + result
    return f"### {name}\n\n```text\n{name}{signature}\n```\n\n{docstring(inspect.getdoc(function) or '')}"


def docstring(text: str) -> str:
    """A docstring as Markdown: fields become a list, a block after ``::`` is fenced."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith(":"):
            fields = re.findall(r"^:(?:param (\w+)|(returns)): (.*(?:\n {4,}.*)*)", block, re.MULTILINE)
            out += ["\n".join(f"- `{p}`: {plain(t)}" if p else f"- returns {plain(t)}" for p, r, t in fields)]
        elif block.startswith(" "):
            if not out[-1].endswith("```"):
                out.append("```py\n" + textwrap.dedent(block) + "\n```")
            else:
                out[-1] = out[-1][:-4] + "\n\n\n" + textwrap.dedent(block) + "\n```"
        else:
            out.append(block.replace("``", "`"))
    return "\n\n".join(part.replace("::\n", ":\n").removesuffix("::") for part in out)


# -- command line -----------------------------------------------------------


def commands_page() -> str:
    """Return every command with its arguments and options, from Typer, and the distribution that brings it."""
    from typer.main import get_command

    group: Any = get_command(app)
    context = group.make_context("engine", ["train", "--help"], resilient_parsing=True)
    offers = our_offers()
    parts = []
    for first in group.list_commands(context):
        command = group.get_command(context, first)
        subs = command.list_commands(context) if hasattr(command, "list_commands") else [""]
        for sub in subs:
            name = f"{first}.{sub}".strip(".")
            if offer := offers.get(("commands", name)):
                one = command.get_command(context, sub) if sub else command
                owner = offer.distribution.name
                parts.append(command_part(f"engine {name.replace('.', ' ')}", one, type(context), owner))
    return page(
        "Command reference",
        "For use of the shell: every command with its arguments, options and an example, as `engine COMMAND --help` shows them, and\n"
        "the distribution that brings it. [Command line](../cli.md) explains what the commands share.",
        *parts,
    )


def command_part(name: str, command: Any, context: Any, owner: str) -> str:
    ctx = context(command, info_name=name)
    parameters = [(p, p.get_help_record(ctx)) for p in command.get_params(ctx) if p.name != "help"]
    names = [re.sub(r" <.*?>$", "", shown[0]) for _, shown in parameters]
    rows = [
        [f"`{each}`", " ".join(shown[1].split())] for each, (_, shown) in zip(names, parameters, strict=True)
    ]
    arguments = [
        each if p.required or each.startswith("[") else f"[{each}]"
        for each, (p, _) in zip(names, parameters, strict=True)
        if p.param_type_name == "argument"
    ]
    usage = " ".join([name, *arguments, *(["[OPTIONS]"] if len(rows) > len(arguments) else [])])
    about, _, example = inspect.cleandoc(command.help or "").partition("\n\nExample: ")
    shown = f"```console\n$ {example}\n```"
    options = table(["argument or option", "what it does"], rows)
    text = f"```text\n{usage}\n```"
    return "\n\n".join(
        [f"## {name}", text, about, *([shown] if example else []), f"Distribution: `{owner}`.", options]
    )


# -- exit codes -------------------------------------------------------------

ENDS = [
    ("0", "", "Done."),
    ("1", "", "A bug of ours, with its traceback."),
    ("7", "", "`engine reproduce` trained, and a number is not as recorded."),
    (
        "75",
        "",
        "A run saved and stopped because its machine or terminal is taken away (SIGTERM, SIGUSR1, SIGHUP); `engine resume` continues it.",
    ),
    ("130", "", "Interrupted with Ctrl-C (SIGINT)."),
    ("143", "", "Terminated (SIGTERM) with nothing to save, or a second time."),
]


def errors_page() -> str:
    """Exit codes, from the classes of ``engine_core.errors``."""
    classes = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.EngineError) and kind is not errors.EngineError
    ]
    rows = ENDS + [
        (str(kind.exit_code), f"`{kind.__name__}`", plain((inspect.getdoc(kind) or "").split("\n\n")[0]))
        for kind in classes
    ]
    ordered = sorted(rows, key=lambda row: (int(row[0]), row[1]))
    return page(
        "Exit codes and errors",
        "For scripts around `engine`, and for users of it from Python: how a command ends, and the exception behind it\n"
        "(`engine_core.errors`). Codes 2 to 6 print `engine: ` and one line a problem, without a traceback: the key or the name,\n"
        "what it is, what was expected, what to do.",
        table(["exit code", "exception", "meaning"], [list(row) for row in ordered]),
        "## Which error a plugin raises",
        "Except from an observer, any of these passes through as it is. Anything else that a hook, a function or a trainer of a plugin raises becomes a `PluginError`\n"
        "that names the plugin and the line, or for a reward a failed sample; so does what a model or an engine of a plugin raises during a run. The traceback is in the\n"
        "run's `run.log`. An error of the engines of this project is a bug: it ends with 1, and its traceback is shown.",
        table(
            ["what is wrong", "raise"],
            [
                [
                    "an option of the plugin",
                    "`ValueError` in a validator of its `Options`; file, line and key are added",
                ],
                ["a key, or keys together", "`ConfigError`, with a list of all problems"],
                ["a row, a file, a checkpoint", "`DataError`"],
                ["the machine: a device, memory, a package", "`EnvironmentProblem`"],
                ["training cannot continue", "`TrainingFailed`"],
            ],
        ),
    )


# -- Python API -------------------------------------------------------------


def api_page(title: str) -> str:
    """Return the page of the modules below one heading of ``api.md``."""
    intro = "The docstrings of [public modules](../api.md)."
    return page(f"Python API: {title.removeprefix('The ')}", intro, *api_pages.sections(title))


# -- compatibility ----------------------------------------------------------


def extras_of(project: Mapping[str, Any]) -> list[list[str]]:
    """Return the requirements of each extra of a distribution, without those of its developers."""
    return [lines for name, lines in project.get("optional-dependencies", {}).items() if name != "dev"]


def compatibility_page() -> str:
    """What was tried, from ``compatibility.toml``, and the versions of ``constraints.txt``."""
    tried = tomllib.loads((DOCS / "compatibility.toml").read_text("utf-8"))
    keys = ["python", "torch", "transformers", "system", "device", "what"]
    projects = [tomllib.loads(file.read_text("utf-8"))["project"] for file in project_files()]
    asked = [line for project in projects for extra in extras_of(project) for line in extra]
    asked += [line for project in projects for line in project["dependencies"]]  # these win over extras
    floors = dict(re.findall(r"^([\w-]+)(.*)", line)[0] for line in asked)
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [line.split("==") for line in lines if "==" in line]
    versions = [[f"`{name}`", version, f"`{floors[name]}`"] for name, version in pinned if name in floors]
    return page(
        "Compatibility",
        "The combinations of versions that were tested. Other combinations may work.",
        "## What was run",
        table(keys, [[str(entry.get(key, "")) for key in keys] for entry in tried["tried"]]),
        "## What has run where",
        table(
            ["subject", "CPUs, gloo", "GPUs of one host, NCCL", "not run"],
            [[entry[key] for key in ("name", "cpu", "gpu", "missing")] for entry in tried["subject"]],
        ),
        "## Versions",
        f"Python {projects[0]['requires-python']}. The second column is the version of the tests (`constraints.txt`), the third the versions that the\n"
        "distribution accepts.",
        table(["package", "tested", "accepted"], versions),
    )


def sandbox_page() -> str:
    """Return the attacks that the sandbox of code rewards stops, with the tier from which on each one fails."""
    from engine_plugin_rewards.sandbox.probes import PROBES

    return page(
        "Attacks that the sandbox stops",
        "For users of [code rewards](../code_reward.md#the-sandbox): each attack of a program, the lowest tier of the sandbox that stops it, and the\n"
        "mechanisms. The tests run each attack in every tier that promises to stop it. A worker tries all of them to find the tier of a machine.",
        table(
            ["a program tries to", "stopped from", "by"],
            [[probe.name, probe.tier, probe.how] for probe in PROBES],
        ),
    )


def install_hints() -> str:
    """Return which of our distributions to install for a name, from the entry points of each."""
    lines = []
    for project in (tomllib.loads(file.read_text("utf-8"))["project"] for file in project_files()[1:]):
        offers = sorted(project["entry-points"].items())
        groups = {g.removeprefix("engine."): sorted(n) for g, n in offers if g.startswith("engine.")}
        lines.append(f'  "{project["name"]}": {json.dumps(groups)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "config.md": config_index,
    **{f"config/{name}.md": partial(config_page, name) for name in CONFIG_PAGES},
    "hooks.md": hooks_page,
    "commands.md": commands_page,
    "errors.md": errors_page,
    "compatibility.md": compatibility_page,
    "sandbox.md": sandbox_page,
    **{api_pages.api_file(title): partial(api_page, title) for title in api_pages.public_modules()},
    "../../engine_core/plugins/known_plugins.json": install_hints,
}


def main(check: bool = False) -> int:
    """Write the pages, or with ``check`` only compare; the number of pages that differ."""
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / "reference" / name, make()
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
    if check and stale:
        print(f"Out of date: {', '.join(stale)}. Run: python docs/references.py")
    return len(stale)


if __name__ == "__main__":
    count = main(check="--check" in sys.argv[1:])
    sys.exit(1 if count and "--check" in sys.argv[1:] else 0)
