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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core import errors
from engine_core import hooks as hookspecs
from engine_core.cli.main import app
from engine_core.config.models import EngineConfig
from engine_core.plugins.metadata import TABLES, Offer, installed
from engine_core.plugins.modules import spec_class, table_module
from engine_plugin_tools.commands.schema import installed_specs
from engine_plugin_tools.commands.schema_text import is_table, type_text
from engine_plugin_tools.schema import json_schema, schema_at

if TYPE_CHECKING:
    from engine_core.specs import Spec

DOCS = Path(__file__).parent
ROOT = DOCS.parent
Table = Mapping[str, Any]


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


def config_page() -> str:
    """Every table and key of a run file."""
    specs = our_specs()
    schema = json_schema(specs)
    parts = [
        config_part(schema, "", "Top level"),
        *(part for key in EngineConfig.model_fields for part in config_parts(schema, key)),
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
        "For readers of run files: every table and key with its type, its default and what it does, of the core and of the\n"
        "plugins in this repository. `engine schema KEY` shows the same for what you have installed, and "
        "`engine config show FILE --origin` where each\nvalue of a run comes from. A default of — means: not set.",
        *parts,
        "## Names",
        "What may stand where a key says *by name*, and the distribution that brings it.",
        table(["what", "name", "distribution"], rows),
    )


def config_parts(schema: Table, path: str) -> Iterator[str]:
    """The section of a table, and those of the tables in it; nothing for a plain key."""
    parent, _, key = path.rpartition(".")
    properties = schema_at(dict(schema), parent)["properties"]
    if key not in properties or not is_table(schema, properties[key]):
        return
    inner = schema_at(dict(schema), path)
    brackets = ("[[", "]]") if "items" in properties[key] else ("[", "]")
    if inner["properties"]:  # a name without options is listed with the names alone
        yield config_part(schema, path, f"`{brackets[0]}{path}{brackets[1]}`")
    for name in inner["properties"]:
        yield from config_parts(schema, f"{path}.{name}")


def config_part(schema: Table, path: str, title: str) -> str:
    node = schema_at(dict(schema), path)
    rows = []
    for key, inner in node["properties"].items():
        if is_table(schema, inner):
            continue
        default = inner.get("default")
        shown = "—" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
        if key in node.get("required", ()):
            shown = "required"
        rows.append([f"`{key}`", f"`{type_text(inner)}`", shown, plain(inner.get("description", ""))])
    text = plain(node.get("description", ""))
    about = re.sub(r"^(`\[+[\w.]+\]+`[:,]? ?)+", "", text)
    listed = table(["key", "type", "default", "what it does"], rows) if rows else ""
    return "\n\n".join(filter(None, [f"## {title}", about[:1].upper() + about[1:], listed]))


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
        "observer": "Observers",
    }
    parts = [part for sort, title in titles.items() for part in (f"## {title}", *found[sort])]
    return page(
        "Hook reference",
        "For authors of plugins: every point that a plugin can change. [Plugins](../plugins.md) shows the main ones at work.\n"
        "Implement a hook with `@hookimpl` and take only the arguments you need.",
        *parts,
    )


def sort_of(function: Any) -> str:
    if function.engine_spec["firstresult"]:
        return "step"
    return "table" if not inspect.signature(function).parameters else "observer"


def hook_part(name: str, function: Any) -> str:
    signature = str(inspect.signature(function)).replace("'", "")
    if len(name + signature) > 88:  # an argument a line
        inside, _, result = signature[1:].rpartition(")")
        signature = "(\n    " + inside.replace(", ", ",\n    ") + "\n)" + result
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
        "distribution that brings it. [The command line](../cli.md) has an example of each.",
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
    )


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


def install_hints() -> str:
    """Return which of our distributions to install for a name, from the entry points of each."""
    lines = []
    for project in (tomllib.loads(file.read_text("utf-8"))["project"] for file in project_files()[1:]):
        offers = sorted(project["entry-points"].items())
        groups = {g.removeprefix("engine."): sorted(n) for g, n in offers if g.startswith("engine.")}
        lines.append(f'  "{project["name"]}": {json.dumps(groups)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "config.md": config_page,
    "hooks.md": hooks_page,
    "commands.md": commands_page,
    "errors.md": errors_page,
    "compatibility.md": compatibility_page,
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
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, "utf-8")
    if check and stale:
        print(f"Out of date: {', '.join(stale)}. Run: python docs/references.py")
    return len(stale)


if __name__ == "__main__":
    count = main(check="--check" in sys.argv[1:])
    sys.exit(1 if count and "--check" in sys.argv[1:] else 0)
