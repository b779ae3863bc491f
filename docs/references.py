"""Writes the pages of ``docs/reference/`` from the code, so that they say what the code does, and the install hints of plugins.

    python docs/references.py            write what changed (`make docs` does this first)
    python docs/references.py --check    change nothing; name the pages that are out of date, exit 1

The pages are committed, so that they can be read on a git host. A test runs ``--check``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import errors
from engine_core import hooks as hookspecs
from engine_core.cli.main import app
from engine_core.plugins.metadata import TABLES, Offer, installed
from engine_core.plugins.modules import spec_class, table_module
from engine_plugin_testing import HOMES
from engine_plugin_tools.commands.schema import installed_specs
from engine_plugin_tools.schema import is_table, json_schema, schema_at, type_text

if TYPE_CHECKING:
    from engine_core.specs import Spec

DOCS = Path(__file__).parent
ROOT = DOCS.parent
Table = dict[str, Any]


def project_files() -> list[Path]:
    """Return the ``pyproject.toml`` of the core, then those of the plugins in this repository."""
    return [ROOT / "pyproject.toml", *sorted((ROOT / "plugins").glob("[a-z]*/pyproject.toml"))]


def page(title: str, intro: str, *parts: str) -> str:
    note = "<!-- Written by docs/references.py from the code. Change the code, then run `make docs`. -->"
    return "\n\n".join([note, f"# {title}", intro, *parts]) + "\n"


def table(header: list[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def plain(text: str) -> str:
    """Markdown of a docstring: one line, names in single back ticks."""
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


# -- config -----------------------------------------------------------------


def our_offers() -> dict[tuple[str, str], Offer]:
    """Return every name of the core and of the plugins in this repository, by kind and name; others may be installed too."""
    ours = {tomllib.loads(file.read_text("utf-8"))["project"]["name"] for file in project_files()}
    return {(offer.kind, offer.name): offer for offer in installed() if offer.distribution.name in ours}


def our_specs() -> dict[str, dict[str, Spec]]:
    """Return the spec of each of our names by kind: the core's tables first, then those that a plugin defines."""
    names = our_offers()
    return {
        kind: {name: spec for name, spec in specs.items() if (kind, name) in names}
        for kind, specs in installed_specs().items()
    }


CONFIG_PAGES = {
    "models": ("Config: models, optimizers, LoRA", ["model", "actor", "ref", "critic", "teacher"]),
    "train_engines": ("Config: train engines", []),
    "sampling": ("Config: sampling, weights, environments", ["rollout", "environment"]),
    "rewards": ("Config: rewards, reward models, judges", ["reward"]),
    "algorithm": ("Config: algorithm and stages", ["algorithm", "stage"]),
    "trainers": ("Config: SFT, preferences, distillation, offline and asynchronous RL", []),
    "data": ("Config: data and evaluation", ["data", "eval"]),
    "run": ("Config: run, checkpoints, tracking", ["run", "checkpoint", "tracking"]),
    "runtime": ("Config: processes and placement", ["runtime", "placement"]),
}
"""Title of each page of ``reference/config/``, and the top-level tables on it."""


def config_tables() -> tuple[Table, dict[str, list[str]]]:
    """Return the schema of a run file with our plugins, and the paths of its tables by page, in the order of the file."""
    specs = our_specs()
    schema = json_schema(specs)
    paths = [path for key in schema["properties"] for path in table_paths(schema, key)]
    return schema, {
        name: [path for path in paths if config_page_of(path, specs) == name] for name in CONFIG_PAGES
    }


def config_page_of(path: str, specs: Mapping[str, Mapping[str, Spec]]) -> str:
    """Return the page of a table: that of its backend where the path names one, else that of its first key."""
    first, *inner = path.split(".")
    if set(inner) & set(specs["rollout_engines"]):
        return "sampling"
    if set(inner) & set(specs["train_engines"]):
        return "train_engines"
    return next((name for name, (_, keys) in CONFIG_PAGES.items() if first in keys), "trainers")


def config_page(name: str) -> str:
    """Return the tables of one page; tables with the same keys are one section."""
    schema, pages = config_tables()
    return page(
        CONFIG_PAGES[name][0],
        "Every key of these tables with its type, its default and its effect. A default of — means: not set. [All tables](../config.md).",
        *(config_part(schema, paths) for paths in same_tables(schema, pages[name])),
    )


def config_index() -> str:
    """Return the keys outside of tables, the page of every table, and what a key *by name* accepts."""
    specs = our_specs()
    schema, pages = config_tables()
    tables = [
        [
            f"[{title.removeprefix('Config: ')}](config/{name}.md)",
            ", ".join(map(partial(shown, schema), named)),
        ]
        for name, (title, _) in CONFIG_PAGES.items()
        if (
            named := [
                path
                for first, *same in same_tables(schema, pages[name])
                for path in [first, *top_level(same)]
            ]
        )
    ]
    offers = our_offers()
    rows = [
        [spec_class(kind).noun, f"`{name}`", f"`{offers[kind, name].distribution.name}`"]
        for kind, named in specs.items()
        if not spec_class(kind).internal  # no key of a run file takes it
        for name in named
    ]
    return page(
        "Config reference",
        "Every table and key of a run file, of the core and of the plugins in this repository. `engine schema KEY` shows the same for\n"
        "what you have installed, and `engine config show FILE --origin` where each value of a run comes from.",
        "## Tables",
        table(["page", "tables"], tables),
        config_part(schema, [""], "Top level"),
        "```{toctree}\n:hidden:\n" + "\n".join(f"config/{name}" for name in CONFIG_PAGES) + "\n```",
        "## Names",
        "The values of a key that is set *by name*, and the distribution that provides each.",
        table(["what", "name", "distribution"], rows),
    )


def top_level(paths: list[str]) -> list[str]:
    return [path for path in paths if "." not in path]


def table_paths(schema: Table, path: str) -> Iterator[str]:
    """Yield the path of a table and of the tables in it; nothing for a plain key or a name without options."""
    parent, _, key = path.rpartition(".")
    properties = schema_at(schema, parent)["properties"]
    if key not in properties or not is_table(schema, properties[key]):
        return
    names = schema_at(schema, path)["properties"]
    if names:
        yield path
    for name in names:
        yield from table_paths(schema, f"{path}.{name}")


def same_tables(schema: Table, paths: list[str]) -> list[list[str]]:
    """Group paths whose tables have the same keys and description, such as ``actor.fsdp`` and ``critic.fsdp``."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(config_part(schema, [path], ""), []).append(path)
    return list(groups.values())


def shown(schema: Table, path: str) -> str:
    """Return the header of a table as a run file has it: ``[actor]``, or ``[[reward]]`` for a list of tables."""
    parent, _, key = path.rpartition(".")
    many = "items" in schema_at(schema, parent)["properties"][key]
    return f"`[[{path}]]`" if many else f"`[{path}]`"


def config_part(schema: Table, paths: list[str], title: str | None = None) -> str:
    """Return the section of the first path; the others are named as tables with the same keys."""
    node = schema_at(schema, paths[0])
    rows = []
    for key, inner in node["properties"].items():
        if is_table(schema, inner):
            continue
        default = inner.get("default")
        value = "—" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
        if key in node.get("required", ()):
            value = "required"
        rows.append(
            [
                f"`{key}`",
                f"`{type_text(inner) if inner.get('enum') != [] else 'string'}`",
                value,
                plain(inner.get("description", "")),
            ]
        )
    text = plain(node.get("description", ""))
    about = re.sub(r"^(`\[+[\w.]+\]+`[:,]? ?)+", "", text)
    others = f"The same keys: {', '.join(shown(schema, path) for path in paths[1:])}." if paths[1:] else ""
    listed = table(["key", "type", "default", "what it does"], rows) if rows else ""
    heading = f"## {shown(schema, paths[0]) if title is None else title}"
    return "\n\n".join(filter(None, [heading, about[:1].upper() + about[1:], others, listed]))


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
        "step": "Step hooks",
        "table": "Table hooks",
        "of plugins": "Table hooks of plugins",
        "observer": "Observers, and options of plugins",
    }
    parts = [part for sort, title in titles.items() for part in (f"## {title}", *found[sort])]
    parts.append(OWN_TABLE.strip())
    return page(
        "Hook reference",
        "For authors of plugins: every point that a plugin can change. [Write a plugin](../plugins.md) shows the main ones at work.\n"
        "Implement a hook with `@hookimpl` and take only the arguments you need.",
        *parts,
    )


OWN_TABLE = '''\
## A table of your own: `engine.tables`

A plugin with a new kind of names defines a table: a module with the class of its entries, `SPECS`, and the hook's specification.

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

The entry point names the module. Other plugins offer their names in a group of the table's name, `engine.graders`:

```toml
[project]
name = "engine-plugin-school"

[project.entry-points."engine.tables"]
graders = "engine_plugin_school.tables"
```

`PluginSet.load({"graders": [name]})` loads a name; `find("graders", name)` of `engine_core.plugins.metadata` gives the distributions that offer it.
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
        "For use of the shell: every command with its arguments and options, as `engine COMMAND --help` shows them, and the\n"
        "distribution that brings it. [Command line](../cli.md) has an example of each.",
        *parts,
    )


def command_part(name: str, command: Any, context: Any, owner: str) -> str:
    ctx = context(command, info_name=name)
    parameters = [(p, p.get_help_record(ctx)) for p in command.get_params(ctx) if p.name != "help"]
    arguments = [
        re.sub(r" <.*?>$", "", shown[0]) for p, shown in parameters if p.param_type_name == "argument"
    ]
    rows = [[f"`{re.sub(r' <.*?>$', '', shown[0])}`", " ".join(shown[1].split())] for _, shown in parameters]
    usage = " ".join([name, *arguments, *(["[OPTIONS]"] if len(rows) > len(arguments) else [])])
    about = inspect.cleandoc(command.help or "")
    options = table(["argument or option", "what it does"], rows)
    return "\n\n".join([f"## {name}", f"```text\n{usage}\n```", about, f"Distribution: `{owner}`.", options])


# -- exit codes -------------------------------------------------------------

ENDS = [
    ("0", "", "Done."),
    ("1", "", "A bug of ours, with its traceback."),
    (
        "75",
        "",
        "A run saved and stopped because its machine is taken away (SIGTERM, SIGUSR1); `engine resume` continues it.",
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
        "that names the plugin and the line, or for a reward a failed sample. The traceback is in the run's `run.log`; that of an engine is shown, too.",
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

ON_OTHER_PAGES = ("engine_core.hooks",)
ALONE = {
    "engine_core.config.roles": "CriticConfig, LoRAConfig, ProcessConfig",
    "engine_core.plugins.plugin_set": "Plugin",
}
"""Members to show of a module whose other members `engine_core.config` or `engine_core.plugins` shows."""
INHERITED = ("engine_core.data",)
"""Modules whose classes are shown with the methods of a private base class."""
ON_DEMAND = {"engine_plugin_testing": HOMES}
"""Modules whose classes are imported when they are used, and these classes."""
TRAINER = "algorithms_trainers_and_data.md#engine_coretraintrainer"
BY_CLASS = ("engine_core.types", "engine_core.contracts.engines", "engine_core.contracts.weight_transport")
"""Modules whose classes have a heading each, so that other pages can link to them."""


def public_modules() -> dict[str, list[str]]:
    """Return the public modules of ``api.md`` by the heading that they are listed under."""
    public = (DOCS / "reference" / "api.md").read_text("utf-8").split("## Internal modules")[0]
    sections = re.findall(r"^###? (.+)\n((?:(?!#).*\n)*)", public, re.MULTILINE)
    found = {title: re.findall(r"^\| `(engine_[\w.]+)`", text, re.MULTILINE) for title, text in sections}
    return {title: names for title, names in found.items() if names}


def api_file(title: str) -> str:
    return f"api/{re.sub(r'[^a-z]+', '_', title.lower())}.md"


def api_page(title: str) -> str:
    """Return the page on which Sphinx puts the docstrings of the modules below one heading of ``api.md``."""
    parts = [api_part(name) for name in public_modules()[title] if name not in ON_OTHER_PAGES]
    intro = "The docstrings of [public modules](../api.md)."
    return page(f"Python API: {title.removeprefix('The ')}", intro, *parts)


def api_part(name: str) -> str:
    """Return the section of a module; the classes of a module of ``BY_CLASS`` are subsections."""
    if name == "engine_core":
        hint = f"`hookimpl` marks the functions of a plugin that are hooks. `Trainer` is that of [engine_core.train.trainer]({TRAINER})."
        return "\n\n".join((f"## {name}", hint, directive("autofunction", "engine_core.load_config", [])))
    options = [f":members: {ALONE.get(name, '')}".rstrip()]
    options += [":inherited-members:"] * (name in INHERITED)
    classes = own_classes(name) if name in BY_CLASS else []
    options += [f":exclude-members: {', '.join(classes)}"] * bool(classes)
    parts = [f"## {name}", *summary(name, classes), directive("automodule", name, options)]
    for each in classes:
        listed = methods(getattr(importlib.import_module(name), each))
        parts += [f"### {each}", *listed, directive("autoclass", f"{name}.{each}", [":members:"])]
    for each in ON_DEMAND.get(name, ()):
        parts += [f"### {each}", directive("autoclass", f"{name}.{each}", [])]
    return "\n\n".join(parts)


def summary(name: str, with_headings: list[str]) -> list[str]:
    """Return the table of a module's classes and functions; of a single class that of its methods.

    Args:
        name: the module.
        with_headings: the classes that are not listed, because they have headings.
    """
    members = {
        each: thing
        for each, thing in vars(importlib.import_module(name)).items()
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ == name
    }
    members = {each: thing for each, thing in members.items() if each not in with_headings}
    if len(members) == 1 and inspect.isclass(only := next(iter(members.values()))):
        return methods(only)
    return purposes(name, members)


def methods(owner: type) -> list[str]:
    """Return the table of the methods that a class defines."""
    found = {each: thing for each, thing in vars(owner).items() if inspect.isfunction(thing)}
    return purposes(f"{owner.__module__}.{owner.__name__}", found)


def purposes(owner: str, members: Mapping[str, Any]) -> list[str]:
    """Return a table of the public members of a module or class with the first sentences of their docstrings; none of fewer than three."""
    lines = [
        f"| {{py:obj}}`{each} <{owner}.{each}>` | {first_sentence(thing)} |"
        for each, thing in members.items()
        if not each.startswith("_") and inspect.getdoc(thing)
    ]
    return ["\n".join(["| name | purpose |", "|---|---|", *lines])] if len(lines) > 2 else []


def first_sentence(thing: Any) -> str:
    """Return the first sentence of a docstring, as Markdown."""
    text = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    text = re.split(r"(?<=[a-z`)])[.:] (?=[A-Z`])", text)[0].rstrip(".:")
    return re.sub(r"`+([^`]+)`+_?", r"`\1`", text).replace("|", "\\|") + "."


def directive(kind: str, name: str, options: list[str]) -> str:
    """Return a directive of autodoc as a block of Markdown."""
    return "\n".join(["```{eval-rst}", f".. {kind}:: {name}", *(f"   {option}" for option in options), "```"])


def own_classes(name: str) -> list[str]:
    """Return the public classes that a module defines, in their order."""
    found = vars(importlib.import_module(name)).items()
    return [
        each
        for each, thing in found
        if inspect.isclass(thing) and thing.__module__ == name and not each.startswith("_")
    ]


# -- compatibility ----------------------------------------------------------


def extras_of(project: Mapping[str, Any]) -> list[list[str]]:
    """Return the requirements of each extra of a distribution, without those of its developers."""
    return [lines for name, lines in project.get("optional-dependencies", {}).items() if name != "dev"]


def compatibility_page() -> str:
    """What was tried, from ``compatibility.toml``, and the versions of ``constraints.txt``."""
    tried = tomllib.loads((DOCS / "compatibility.toml").read_text("utf-8"))["tried"]
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
        table(keys, [[str(entry.get(key, "")) for key in keys] for entry in tried]),
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
    **{api_file(title): partial(api_page, title) for title in public_modules()},
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
